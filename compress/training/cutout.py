"""Cutout: set a random square of every image to zero (DeVries and Taylor 2017)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def cutout(batch: Any, size: int) -> Any:
    """Return a batch whose images have a square of `size` pixels at zero; it may lie partly outside the image.

    Images are the floating point tensors with four dimensions. The arguments stay unchanged.
    """

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim != 4 or not value.is_floating_point():
            return value
        inside = []
        for dim in (2, 3):
            length = value.shape[dim]
            center = torch.randint(length, (len(value), 1), device=value.device)
            offset = torch.arange(length, device=value.device) - (center - size // 2)
            inside.append((offset >= 0) & (offset < size))
        square = inside[0][:, None, :, None] & inside[1][:, None, None, :]
        return value.masked_fill(square, 0)

    return pytree.tree_map(cut, batch)
