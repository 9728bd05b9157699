"""Calibration images by name: a folder of image files, or the training data of a source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compress.data import calibration_loader
from compress.recipe import Data


def test_folder_gives_all_images_below_it_sorted(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    from PIL import Image

    for number, name in enumerate(["b.png", "a/c.jpg", "a/B.PNG"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (40, 30), (100 * number, 0, 0)).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    (batch,) = calibration_loader(f"folder:{tmp_path}", Data(batch_size=8, size=16))
    assert batch.shape == (3, 3, 16, 16)
    red = (batch[:, 0, 8, 8] * 0.229 + 0.485) * 255
    assert torch.allclose(red, torch.tensor([200.0, 100.0, 0.0]), atol=3)  # a/B.PNG, a/c.jpg, b.png


def test_folder_without_images_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    with pytest.raises(FileNotFoundError, match=r"expected images .* in it; found none"):
        calibration_loader(f"folder:{tmp_path}", Data())
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        calibration_loader(f"folder:{tmp_path / 'missing'}", Data())


def test_other_sources_give_their_training_data() -> None:
    pytest.importorskip("sklearn")
    images, _ = next(iter(calibration_loader("digits", Data(batch_size=8))))
    assert images.shape == (8, 1, 8, 8)
    with pytest.raises(ValueError, match=r"data\.source 'nothing': expected digits"):
        calibration_loader("nothing", Data())


def no_data() -> tuple[None, None]:
    return None, None


def test_source_without_training_data_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"--calibration data\.test_image_files:no_data: expected a source with training"
    ):
        calibration_loader("data.test_image_files:no_data", Data())
