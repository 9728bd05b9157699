"""Samples of what a linear layer or convolution reads and writes, as rows of matrices.

A convolution is a linear map from patches to outputs: row s of X holds the patch of one output position (all channels
and taps, zeros where the kernel reaches over the border), row s of Y the outputs there. Both have a dimension of
groups. Rows are drawn at random, evenly over images and positions: a least squares problem with D unknowns per output
needs a few times D rows, and a layer of a convolutional network has a hundred times as many.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HELD_OUT = 4  # one in so many rows is held out


def num_groups(layer: nn.Module) -> int:
    """Return the groups of a convolution; 1 for a linear layer."""
    return layer.groups if isinstance(layer, nn.modules.conv._ConvNd) else 1


def num_unknowns(layer: nn.Module) -> int:
    """Return the number of weights of one output."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return math.prod(weight.shape[1:])


def draw_rows(output_shape: torch.Size, is_linear: bool, count: int, key: str) -> Tensor:
    """Return up to `count` rows, sorted: one at a random place in each of `count` equal parts of all rows.

    Args:
        output_shape: of the layer's output, which has a row for each image and position.
        key: the rows depend on it, so that every layer and batch has its own.
    """
    total = math.prod(output_shape[:-1]) if is_linear else output_shape[0] * math.prod(output_shape[2:])
    if total <= count:
        return torch.arange(total)
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    places = (torch.arange(count) + torch.rand(count, generator=generator, dtype=torch.float64)) * (total / count)
    return places.long().clamp_(max=total - 1)


def num_fitted(rows: Tensor, total: int) -> int:
    """Return how many of the sorted rows are fitted; the others, in the last quarter of the batch, are held out."""
    return int(torch.searchsorted(rows, total - total // HELD_OUT))


def output_rows(layer: nn.Module, output: Tensor, rows: Tensor) -> Tensor:
    """Return rows of a layer's output, of shape (rows, outputs)."""
    rows = rows.to(output.device)
    if isinstance(layer, nn.Linear):
        return output.reshape(-1, output.shape[-1])[rows]
    image, place = _split(rows, math.prod(output.shape[2:]))
    return output.flatten(2)[image, :, place]


def input_rows(layer: nn.Module, x: Tensor, output_shape: Any, rows: Tensor) -> Tensor:
    """Return what a layer reads to compute rows of its output, of shape (rows, groups, unknowns)."""
    rows = rows.to(x.device)
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, 1, x.shape[-1])[rows]
    assert isinstance(layer, nn.modules.conv._ConvNd)
    x = pad_input(layer, x)
    sizes = list(output_shape[2:])
    image, place = _split(rows, math.prod(sizes))
    dims = len(sizes)
    index: list[Any] = [image.view(-1, *[1] * dims), slice(None)]
    for d in range(dims):
        at = place // math.prod(sizes[d + 1 :]) % sizes[d]
        taps = torch.arange(layer.kernel_size[d], device=x.device) * layer.dilation[d]
        coordinates = at[:, None] * layer.stride[d] + taps
        index.append(coordinates.view(-1, *[layer.kernel_size[d] if i == d else 1 for i in range(dims)]))
    patches = x[tuple(index)].movedim(-1, 1)  # the indexed dimensions come first, then the channels
    return patches.reshape(len(rows), layer.groups, -1)


def channel_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return the channels of a convolution's input at rows of its own positions, of shape (rows, 1, channels)."""
    rows = rows.to(x.device)
    image, place = _split(rows, math.prod(x.shape[2:]))
    return x.flatten(2)[image, :, place][:, None]


def pad_input(layer: nn.modules.conv._ConvNd, x: Tensor) -> Tensor:
    """Return the input of a convolution with its padding."""
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    widths = [width for size in reversed(layer.padding) for width in (size, size)]
    return F.pad(x, widths) if any(widths) else x


def _split(rows: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    return rows // positions, rows % positions
