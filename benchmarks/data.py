"""CIFAR-10 as normalized tensors, from an archive of JPEG files or from torchvision's folder."""

from __future__ import annotations

import argparse
import io
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset
from torchvision.datasets import CIFAR10

from .results import ROOT

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def add_data_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--data` to a parser."""
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder with data sets and models"
    )


@cache
def load_cifar10(data: Path, split: str, count: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """Return images `start` to `start + count` of the `train` or `test` split, and their labels.

    Reads cifar10/{train,test}.npz, which contain JPEG files, or torchvision's CIFAR10 folder.

    Raises:
        FileNotFoundError: `data` contains neither.
    """
    if (archived := data / "cifar10" / f"{split}.npz").exists():
        with np.load(archived) as archive:
            jpeg, offset, label = (archive[key] for key in ("jpeg", "offset", "label"))
        indices = range(start, start + count)
        files = (io.BytesIO(jpeg[offset[i] : offset[i + 1]].tobytes()) for i in indices)
        pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    else:
        try:
            dataset = CIFAR10(str(data), split == "train")
        except RuntimeError as error:
            raise FileNotFoundError(
                f"--data {data}: expected cifar10/train.npz or torchvision's CIFAR10 in this folder; found neither"
            ) from error
        pixels, label = dataset.data[start : start + count], np.array(dataset.targets)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    images = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return images, torch.from_numpy(label[start : start + count].astype(np.int64))


class CropFlipDataset(TensorDataset):
    """Images and labels with random padded crops and horizontal flips."""

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(i)
        x = torch.nn.functional.pad(x, (4, 4, 4, 4))
        a, b, flip = (int(n) for n in torch.randint(0, 9, (3,)))
        x = x[:, a : a + 32, b : b + 32]
        return (x.flip(-1) if flip % 2 else x), y
