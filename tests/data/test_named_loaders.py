"""Loaders by name: packaged data, folders of images, archives of JPEGs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import compress
from compress.data.named_loaders import is_factory
from compress.data.named_loaders import loaders as loaders_by_name
from compress.data.named_loaders import test_loader as load_test_images
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


def _write_archives(folder: Path, count: int) -> None:
    import io

    import numpy as np
    from PIL import Image

    for split in ("train", "test"):
        files = []
        for i in range(count):
            file = io.BytesIO()
            Image.new("RGB", (32, 32), (10 * i, 0, 0)).save(file, "JPEG")
            files.append(np.frombuffer(file.getvalue(), dtype=np.uint8))
        offset = np.cumsum([0, *map(len, files)])
        np.savez(folder / f"{split}.npz", jpeg=np.concatenate(files), offset=offset, label=np.arange(count))


def test_archives_of_jpegs_are_read(tmp_path: Path) -> None:
    """A tenth of the training images is for validation; the test images are test data."""
    _write_archives(tmp_path, 20)
    data = Data(source=f"cifar10:{tmp_path}", batch_size=6)
    train, val = loaders_by_name(data)
    assert next(iter(train or ()))[0].shape == (6, 3, 32, 32)
    numbers = [y for _, labels in val or () for y in labels.tolist()]
    assert len(numbers) == 2
    assert [y for _, labels in loaders_by_name(data)[1] or () for y in labels.tolist()] == numbers
    trained = {int(train.dataset[i][1]) for i in range(18)}  # type: ignore[union-attr]
    assert trained == set(range(20)) - set(numbers)
    x, _ = next(iter(val or ()))
    assert torch.equal(x, next(iter(val or ()))[0])  # without random crops
    assert [y for _, labels in load_test_images(data) or () for y in labels.tolist()] == list(range(20))
    half = data.model_copy(update={"validation": 0.5})
    assert len(loaders_by_name(half)[1].dataset) == 10  # type: ignore[union-attr]


def test_part_of_a_folder_can_be_held_out_and_classes_be_named(tmp_path: Path) -> None:
    from PIL import Image

    for split in ("train", "val"):
        for name in ("bird", "cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (40, 30), (50 * i, 90, 20)).save(tmp_path / split / name / f"{i}.png")
    data = Data(source=f"folder:{tmp_path}", size=16, classes=("dog", "bird"))
    train, val = loaders_by_name(data)
    assert len(train.dataset) == len(val.dataset) == 8  # type: ignore[union-attr]
    assert train.dataset.classes == ["dog", "bird"]  # type: ignore[union-attr]
    assert load_test_images(data) is None
    held = data.model_copy(update={"validation": 0.25})
    train, val = loaders_by_name(held)
    assert (len(train.dataset), len(val.dataset)) == (6, 2)  # type: ignore[union-attr]
    assert len(load_test_images(held).dataset) == 8  # type: ignore[union-attr]
    with pytest.raises(FileNotFoundError, match=r"data.classes: expected folders of .*train; there is no fish"):
        loaders_by_name(data.model_copy(update={"classes": ("dog", "fish")}))
    with pytest.raises(ValueError, match=r"data.classes: only for folder:FOLDER; data.source is 'digits'"):
        loaders_by_name(Data(source="digits", classes=("0", "1")))


def test_source_with_a_test_part_is_measured_on_it_at_the_end() -> None:
    recipe = {"budget": {"macs": "60%"}, "search": "magnitude", "timing": {"repeats": 3}}
    report = compress.prune(dense(), {**recipe, "data": {"source": "digits", "validation": 0.2}}, quiet=True).report
    assert report.pruned.test.keys() == report.pruned.metrics.keys()
    assert not compress.prune(dense(), {**recipe, "data": {"source": "digits"}}, quiet=True).report.pruned.test


@pytest.mark.parametrize("source", ["digits", "digits:x", "folder:a", "cifar10:a", "cifar100:a:b", "none", "x:", None])
def test_sources_that_run_no_code_are_no_factories(source: str | None) -> None:
    assert not is_factory(source)


@pytest.mark.parametrize("source", ["a:b", "a.b:c", "Digits:x", " folder:x", "os:getcwd", ":x"])
def test_every_other_source_with_a_colon_is_a_factory(source: str) -> None:
    assert is_factory(source)
