"""Loaders by name, for the command line and for recipes with a `data.source`."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from compress.recipe import Data

DATA_SOURCES = "digits, cifar10:FOLDER, cifar100:FOLDER, folder:FOLDER (with train/ and val/) or package.module:factory"
SOURCES_WITHOUT_CODE = ("digits", "cifar10", "cifar100", "folder")  # whatever else has a colon names a factory
CIFAR_VALIDATION = 0.1  # part of the training images; the test images choose nothing
IMAGENET_MEAN_STD = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TrainValLoaders = tuple[Iterable[Any] | None, Iterable[Any] | None]


def loaders(data: Data) -> TrainValLoaders:
    """Return the training and validation loaders of (image, class) that a recipe names.

    Raises:
        ValueError: there is no such source, or its factory does not return two loaders.
        FileNotFoundError: the folder does not hold what the source needs.
    """
    kind, _, rest = (data.source or "").partition(":")
    if is_factory(data.source):
        return _call_factory(kind, rest, data)
    train, val, _ = _datasets(data)
    workers: dict[str, Any] = {"num_workers": data.workers, "pin_memory": torch.cuda.is_available()}
    drop_last = len(train) > data.batch_size  # type: ignore[arg-type]
    return (
        DataLoader(train, data.batch_size, shuffle=True, drop_last=drop_last, **workers),
        DataLoader(val, data.batch_size, **workers),
    )


def test_loader(data: Data) -> Iterable[Any] | None:
    """Return the loader of the test images of a source, or None if its own split has none besides the validation part.

    CIFAR's test images, and val/ of a folder if `data.validation` holds a part of train/ out.

    Raises:
        ValueError: there is no such source.
        FileNotFoundError: the folder does not hold what the source needs.
    """
    if data.source is None or is_factory(data.source):
        return None
    test = _datasets(data, only_test=True)[2]
    if test is None:
        return None
    return DataLoader(test, data.batch_size, num_workers=data.workers, pin_memory=torch.cuda.is_available())


def is_factory(source: str | None) -> bool:
    """Return whether a data source names a function, which is imported and called.

    >>> is_factory("my_package.my_data:make_loaders"), is_factory("folder:imagenet")
    (True, False)
    """
    kind, _, rest = (source or "").partition(":")
    return bool(rest) and kind not in SOURCES_WITHOUT_CODE


def digits_datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return training and validation sets of scikit-learn's 1797 handwritten digits (1x8x8), split 4 to 1."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(labels, dtype=torch.long)
    test = torch.arange(len(x)) % 5 == 0
    return TensorDataset(x[~test], y[~test]), TensorDataset(x[test], y[test])


def _call_factory(module: str, name: str, data: Data) -> TrainValLoaders:
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"data.source {module}:{name}: {error}. Expected {DATA_SOURCES}.") from error
    pair = factory(data) if _takes_argument(factory) else factory()
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"data.source {module}:{name}: expected (train, val) loaders; got {type(pair).__name__}")
    return pair[0], pair[1]


def _takes_argument(factory: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
        return any(p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
    except ValueError:  # a class written in C has no signature
        return False


Datasets = tuple[Dataset[Any], Dataset[Any], Dataset[Any] | None]  # training, validation, test
Views = tuple[Dataset[Any], Dataset[Any]]  # the same images with random crops, and without


def _datasets(data: Data, only_test: bool = False) -> Datasets:
    kind, _, rest = (data.source or "").partition(":")
    if data.classes is not None and kind != "folder":
        raise ValueError(f"data.classes: only for folder:FOLDER; data.source is {data.source!r}")
    if kind == "digits":
        digits, own_split = digits_datasets()
        if data.validation is None:
            return digits, own_split, None
        return *_hold_out((digits, digits), data.validation), own_split
    if kind in ("cifar10", "cifar100") and rest:
        views, test = _cifar_datasets(kind, Path(rest), data, only_test)
        part = CIFAR_VALIDATION if data.validation is None else data.validation
        return *_hold_out(views, part), test
    if kind == "folder" and rest:
        views, val = _folder_datasets(Path(rest), data)
        return (views[0], val, None) if data.validation is None else (*_hold_out(views, data.validation), val)
    raise ValueError(f"data.source {data.source!r}: expected {DATA_SOURCES}")


def _hold_out(views: Views, part: float) -> tuple[Dataset[Any], Dataset[Any]]:
    """Split images in two: a random part, always the same, is read without random crops."""
    order = torch.randperm(len(views[0]), generator=torch.Generator().manual_seed(0)).tolist()  # type: ignore[arg-type]
    num_held = max(1, round(part * len(order)))
    return Subset(views[0], sorted(order[num_held:])), Subset(views[1], sorted(order[:num_held]))


def _cifar_datasets(kind: str, folder: Path, data: Data, only_test: bool) -> tuple[Views, Dataset[Any]]:
    """Read torchvision's CIFAR, or {train,test}.npz of JPEG files; train with padded crops and flips."""
    from torchvision import datasets, transforms

    size = data.size or 32
    plain = [transforms.ToTensor(), transforms.Normalize(*IMAGENET_MEAN_STD)]
    if size != 32:
        plain.insert(0, transforms.Resize(size))
    crops = [transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip(), *plain]
    random, fixed = transforms.Compose(crops), transforms.Compose(plain)
    if (folder / "train.npz").exists():
        test = _JpegArchive(folder / "test.npz", fixed)
        train: Any = test if only_test else _JpegArchive(folder / "train.npz", random)
    else:
        make = datasets.CIFAR10 if kind == "cifar10" else datasets.CIFAR100
        try:
            train, test = make(str(folder), True, random), make(str(folder), False, fixed)
        except RuntimeError as error:
            raise FileNotFoundError(
                f"data.source {kind}:{folder}: found neither torchvision's {kind} nor train.npz and test.npz there"
            ) from error
    same_images = copy.copy(train)
    same_images.transform = fixed
    if hasattr(same_images, "transforms"):  # torchvision calls this one
        same_images.transforms = datasets.vision.StandardTransform(fixed)
    return (train, same_images), test


def _folder_datasets(folder: Path, data: Data) -> tuple[Views, Dataset[Any]]:
    """Read train/CLASS/image and val/CLASS/image; train with random crops and flips, validate on center crops."""
    from torchvision import datasets, transforms

    if missing := [name for name in ("train", "val") if not (folder / name).is_dir()]:
        raise FileNotFoundError(
            f"data.source folder:{folder}: expected train/ and val/ in it; {missing[0]}/ is missing"
        )
    for split in ("train", "val"):
        if absent := [name for name in data.classes or () if not (folder / split / name).is_dir()]:
            raise FileNotFoundError(
                f"data.classes: expected folders of {folder / split}; there is no {', '.join(absent[:3])}"
            )

    class SomeClasses(datasets.ImageFolder):  # type: ignore[misc]
        def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
            names = list(data.classes) if data.classes else super().find_classes(directory)[0]
            return names, {name: number for number, name in enumerate(names)}

    size = data.size or 224
    tail = [transforms.ToTensor(), transforms.Normalize(*IMAGENET_MEAN_STD)]
    crops = transforms.Compose([transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), *tail])
    plain = transforms.Compose([transforms.Resize(round(size / 0.875)), transforms.CenterCrop(size), *tail])
    train = str(folder / "train")
    return (SomeClasses(train, crops), SomeClasses(train, plain)), SomeClasses(str(folder / "val"), plain)


class _JpegArchive(Dataset[tuple[Tensor, int]]):
    """Images of an .npz archive, decoded once: image i is the JPEG file jpeg[offset[i]:offset[i + 1]]."""

    def __init__(self, path: Path, transform: Callable[[Any], Tensor]) -> None:
        from PIL import Image

        with np.load(path) as archive:
            jpeg, offset, label = (archive[key] for key in ("jpeg", "offset", "label"))
        parts = [jpeg[a:b].tobytes() for a, b in itertools.pairwise(offset)]
        self.images = [Image.open(io.BytesIO(part)).convert("RGB") for part in parts]
        self.labels = label.astype(int).tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.transform(self.images[i]), self.labels[i]
