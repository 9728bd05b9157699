"""Operators with sizes of their own making, for code that a graph is to hold: each with its translation to ONNX.

torch.export reasons about every size as an expression in those of the inputs. Windows over padded maps of any size,
or as many boxes as pass a test, are beyond it; behind one of these operators a size is a new unknown, or that of
another tensor. They run on torch's and torchvision's kernels, and become standard operators in the file.
"""

# mypy: disable-error-code="no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor
from torch.library import custom_op, get_ctx

KERNELS = torch.ops.torchvision


@custom_op("compress::top", mutates_args=())
def top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of a row of numbers and where they stand, or all of them where there are not so many."""
    values, places = scores.topk(min(count, len(scores)))
    return values, places


@top.register_fake
def _(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    size = get_ctx().new_dynamic_size()
    return scores.new_empty(size), scores.new_empty(size, dtype=torch.long)


@custom_op("compress::nms", mutates_args=())
def nms(boxes: Tensor, scores: Tensor, threshold: float, count: int) -> Tensor:
    """The boxes that no better one overlaps by more than the threshold, best first, so many at the most."""
    kept: Tensor = torchvision.ops.nms(boxes, scores, threshold)
    return kept[:count].clone()


@nms.register_fake
def _(boxes: Tensor, scores: Tensor, threshold: float, count: int) -> Tensor:
    size = get_ctx().new_dynamic_size(min=1)  # layers ask whether there are any; the file does not, and none is fine
    return boxes.new_empty(size, dtype=torch.long)


@custom_op("compress::regions", mutates_args=())
def regions(
    maps: Sequence[Tensor], boxes: Tensor, levels: Tensor, scales: Sequence[float], size: int, samples: int, half: bool
) -> Tensor:
    """RoIAlign of every box on the map that its level names; `half` shifts coordinates by half a pixel."""
    out = boxes.new_zeros(len(boxes), maps[0].shape[1], size, size)
    for level, (source, scale) in enumerate(zip(maps, scales, strict=True)):
        at = (levels == level).nonzero().flatten()
        rois = torch.cat([boxes.new_zeros(len(at), 1), boxes[at]], 1)
        out[at] = KERNELS.roi_align(source, rois, scale, size, size, samples, half)
    return out


@regions.register_fake
def _(
    maps: Sequence[Tensor], boxes: Tensor, levels: Tensor, scales: Sequence[float], size: int, samples: int, half: bool
) -> Tensor:
    return boxes.new_empty(boxes.shape[0], maps[0].shape[1], size, size)


@custom_op("compress::padded", mutates_args=())
def padded(x: Tensor, down: int, right: int, value: float) -> Tensor:
    """Images with a margin below and at the right, so that their height and width are multiples."""
    return F.pad(x, (0, -x.shape[3] % right, 0, -x.shape[2] % down), value=value).clone()


@padded.register_fake
def _(x: Tensor, down: int, right: int, value: float) -> Tensor:
    height, width = (get_ctx().new_dynamic_size(min=1) for _ in range(2))
    return x.new_empty(x.shape[0], x.shape[1], height * down, width * right)


@custom_op("compress::windows", mutates_args=())
def windows(x: Tensor, side: int, shift: int) -> tuple[Tensor, Tensor]:
    """Windows of a padded and shifted map (batch, height, width, channels), and what keeps their parts from each other.

    The places of a window are in a row. What was apart before the shift may not attend to each other: -100 there.
    """
    batch, _, _, channels = x.shape
    x = F.pad(x, (0, 0, 0, -x.shape[2] % side, 0, -x.shape[1] % side))
    x = torch.roll(x, (-shift, -shift), (1, 2))
    rows, columns = x.shape[1] // side, x.shape[2] // side
    x = x.view(batch, rows, side, columns, side, channels).transpose(2, 3).reshape(-1, side * side, channels)
    part = _parts(rows * side, side, shift)[:, None] * 3 + _parts(columns * side, side, shift)
    part = part.view(rows, side, columns, side).transpose(1, 2).reshape(rows * columns, side * side).to(x.device)
    apart = torch.where(part[:, None] == part[:, :, None], 0.0, -100.0).to(x.dtype)
    return x, apart[:, None].repeat(batch, 1, 1, 1)


@windows.register_fake
def _(x: Tensor, side: int, shift: int) -> tuple[Tensor, Tensor]:
    count = get_ctx().new_dynamic_size()
    return x.new_empty(count, side * side, x.shape[3]), x.new_empty(count, 1, side * side, side * side)


@custom_op("compress::whole", mutates_args=())
def whole(parts: Tensor, like: Tensor, side: int, shift: int) -> Tensor:
    """The map of which these are the windows; `like` has its shape."""
    batch, height, width, _ = like.shape
    rows, columns = -(-height // side), -(-width // side)
    x = parts.view(batch, rows, columns, side, side, parts.shape[2]).transpose(2, 3)
    x = torch.roll(x.reshape(batch, rows * side, columns * side, -1), (shift, shift), (1, 2))
    return x[:, :height, :width].clone()


@whole.register_fake
def _(parts: Tensor, like: Tensor, side: int, shift: int) -> Tensor:
    return torch.empty_like(like)


def _parts(length: int, side: int, shift: int) -> Tensor:
    """Which of the three parts of a shifted side a place is in."""
    place = torch.arange(length)
    return (place >= length - side).long() + (place >= length - shift).long() if shift else place * 0


def table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The translations, by operator."""
    from .translations import TABLE

    return {getattr(torch.ops.compress, name).default: function for name, function in TABLE.items()}
