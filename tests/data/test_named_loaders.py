"""Loaders by name: packaged data, folders of images, archives of JPEGs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import compress
from compress.data.named_loaders import is_factory
from compress.data.named_loaders import loaders as loaders_by_name
from compress.recipe import Data
from helpers.digits import RECIPE, dense


@pytest.mark.parametrize(
    ("source", "match", "error"),
    [
        ("digit", "data.source 'digit': expected digits, cifar10:FOLDER", ValueError),
        ("cifar10:", "expected digits, cifar10:FOLDER", ValueError),
        ("cifar10:nowhere", "found neither torchvision's cifar10 nor train.npz", FileNotFoundError),
        ("folder:nowhere", "expected train/ and val/ in it; train/ is missing", FileNotFoundError),
        ("no.such.module:make", "No module named 'no'", ValueError),
        ("compress.data.named_loaders:nothing", "has no attribute", ValueError),
        ("builtins:dict", "expected \\(train, val\\) loaders; got dict", ValueError),
    ],
)
def test_sources_that_do_not_exist_are_named(source: str, match: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=match):
        loaders_by_name(Data(source=source))
    with pytest.raises(compress.NotReady, match=match):
        compress.prune(dense(), {**RECIPE, "data": {"source": source}}, quiet=True)


def test_folders_of_images_are_read(tmp_path: Path) -> None:
    from PIL import Image

    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (40, 30), (50 * i, 90, 20)).save(tmp_path / split / name / f"{i}.png")
    train, val = loaders_by_name(Data(source=f"folder:{tmp_path}", batch_size=2, size=16))
    x, _ = next(iter(train or ()))
    assert x.shape == (2, 3, 16, 16)
    assert len(list(val or ())) == 3
    assert set(torch.cat([y for _, y in val or ()]).tolist()) == {0, 1}


def test_archives_of_jpegs_are_read(tmp_path: Path) -> None:
    import io

    import numpy as np
    from PIL import Image

    for split in ("train", "test"):
        files = []
        for i in range(5):
            file = io.BytesIO()
            Image.new("RGB", (32, 32), (40 * i, 0, 0)).save(file, "JPEG")
            files.append(np.frombuffer(file.getvalue(), dtype=np.uint8))
        offset = np.cumsum([0, *map(len, files)])
        np.savez(tmp_path / f"{split}.npz", jpeg=np.concatenate(files), offset=offset, label=np.arange(5))
    train, val = loaders_by_name(Data(source=f"cifar10:{tmp_path}", batch_size=5))
    assert next(iter(train or ()))[0].shape == (5, 3, 32, 32)
    assert next(iter(val or ()))[1].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("source", ["digits", "digits:x", "folder:a", "cifar10:a", "cifar100:a:b", "none", "x:", None])
def test_sources_that_run_no_code_are_no_factories(source: str | None) -> None:
    assert not is_factory(source)


@pytest.mark.parametrize("source", ["a:b", "a.b:c", "Digits:x", " folder:x", "os:getcwd", ":x"])
def test_every_other_source_with_a_colon_is_a_factory(source: str) -> None:
    assert is_factory(source)
