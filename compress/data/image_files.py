"""Inputs without labels by name, for the command line: a folder of images, or the training images of a data source."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from compress.recipe import Data

from .named_loaders import IMAGENET_MEAN_STD, loaders

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")


def calibration_loader(source: str, data: Data) -> Iterable[Any]:
    """Return a loader of inputs: the images in a `folder:FOLDER` and below it, or the training data of a source.

    Args:
        source: as `data.source` in a recipe; a folder needs neither train/ nor val/.
        data: batch size, image size and workers.

    Raises:
        ValueError: there is no such source, or it has no training data.
        FileNotFoundError: the folder holds no images.
    """
    kind, _, folder = source.partition(":")
    if kind == "folder" and folder:
        return DataLoader(_ImageFiles(Path(folder), data.size or 224), data.batch_size, num_workers=data.workers)
    train, _ = loaders(data.model_copy(update={"source": source}))
    if train is None:
        raise ValueError(f"--calibration {source}: expected a source with training data; it has none")
    return train


class _ImageFiles(Dataset[Tensor]):
    """All images in a folder and below it, sorted by path, as center crops with ImageNet's mean and deviation."""

    def __init__(self, folder: Path, size: int) -> None:
        from torchvision import transforms

        files = folder.rglob("*") if folder.is_dir() else ()
        self.paths = sorted(path for path in files if path.suffix.lower() in IMAGE_SUFFIXES)
        if not self.paths:
            raise FileNotFoundError(
                f"--calibration folder:{folder}: expected images ({', '.join(IMAGE_SUFFIXES[:3])}, ...) in it; "
                + ("found none" if folder.is_dir() else "there is no such folder")
            )
        crops = [transforms.Resize(round(size / 0.875)), transforms.CenterCrop(size)]
        normalize = [transforms.ToTensor(), transforms.Normalize(*IMAGENET_MEAN_STD)]
        self.transform: Callable[[Any], Tensor] = transforms.Compose([*crops, *normalize])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Tensor:
        from PIL import Image

        with Image.open(self.paths[i]) as image:
            return self.transform(image.convert("RGB"))
