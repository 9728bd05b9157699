"""Custom operators whose output sizes torch.export cannot express, each with a translation to ONNX.

torch.export describes every size as an expression in the input sizes. That fails for windows over a padded map of any
size, and for the number of boxes that pass a threshold. The output size of one of these operators is a new symbol, or
that of another tensor. In PyTorch they run on torch's and torchvision's kernels; in the file they are standard
operators.
"""

# mypy: disable-error-code="no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op, get_ctx


@custom_op("compress::top", mutates_args=())
def top_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest scores (all if there are fewer) and their indices."""
    values, indices = scores.topk(min(count, len(scores)))
    return values, indices


@top_scores.register_fake
def _(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    size = get_ctx().new_dynamic_size()
    return scores.new_empty(size), scores.new_empty(size, dtype=torch.long)


@custom_op("compress::nms", mutates_args=())
def nms(boxes: Tensor, scores: Tensor, threshold: float, count: int) -> Tensor:
    """Return the indices of at most `count` boxes kept by non-maximum suppression, best first."""
    import torchvision

    kept: Tensor = torchvision.ops.nms(boxes, scores, threshold)
    return kept[:count].clone()


@nms.register_fake
def _(boxes: Tensor, scores: Tensor, threshold: float, count: int) -> Tensor:
    size = get_ctx().new_dynamic_size(min=1)  # layers branch on "no boxes"; the file does not, and runs without any
    return boxes.new_empty(size, dtype=torch.long)


@custom_op("compress::regions", mutates_args=())
def roi_align_levels(
    maps: Sequence[Tensor], boxes: Tensor, levels: Tensor, scales: Sequence[float], size: int, samples: int, half: bool
) -> Tensor:
    """Apply RoIAlign to each box on the feature map of its level; `half` shifts coordinates by half a pixel."""
    import torchvision  # noqa: F401  (it registers the kernel)

    roi_align = torch.ops.torchvision.roi_align
    pooled = boxes.new_zeros(len(boxes), maps[0].shape[1], size, size)
    for level, (feature_map, scale) in enumerate(zip(maps, scales, strict=True)):
        at = (levels == level).nonzero().flatten()
        rois = torch.cat([boxes.new_zeros(len(at), 1), boxes[at]], 1)
        pooled[at] = roi_align(feature_map, rois, scale, size, size, samples, half)
    return pooled


@roi_align_levels.register_fake
def _(
    maps: Sequence[Tensor], boxes: Tensor, levels: Tensor, scales: Sequence[float], size: int, samples: int, half: bool
) -> Tensor:
    return boxes.new_empty(boxes.shape[0], maps[0].shape[1], size, size)


@custom_op("compress::padded", mutates_args=())
def pad_to_multiple(x: Tensor, down: int, right: int, value: float) -> Tensor:
    """Pad images at the bottom to a multiple of `down` and on the right to a multiple of `right`."""
    return F.pad(x, (0, -x.shape[3] % right, 0, -x.shape[2] % down), value=value).clone()


@pad_to_multiple.register_fake
def _(x: Tensor, down: int, right: int, value: float) -> Tensor:
    height, width = (get_ctx().new_dynamic_size(min=1) for _ in range(2))
    return x.new_empty(x.shape[0], x.shape[1], height * down, width * right)


@custom_op("compress::windows", mutates_args=())
def partition_windows(x: Tensor, side: int, shift: int) -> tuple[Tensor, Tensor]:
    """Partition a padded and shifted map (batch, height, width, channels) into windows; return them and their mask.

    Windows are (windows, side * side, channels). The attention mask (windows, 1, side * side, side * side) is -100
    between positions that were not adjacent before the shift, and 0 elsewhere.
    """
    batch, _, _, channels = x.shape
    x = F.pad(x, (0, 0, 0, -x.shape[2] % side, 0, -x.shape[1] % side))
    x = torch.roll(x, (-shift, -shift), (1, 2))
    rows, columns = x.shape[1] // side, x.shape[2] // side
    x = x.view(batch, rows, side, columns, side, channels).transpose(2, 3).reshape(-1, side * side, channels)
    region = _shift_regions(rows * side, side, shift)[:, None] * 3 + _shift_regions(columns * side, side, shift)
    region = region.view(rows, side, columns, side).transpose(1, 2).reshape(rows * columns, side * side).to(x.device)
    mask = torch.where(region[:, None] == region[:, :, None], 0.0, -100.0).to(x.dtype)
    return x, mask[:, None].repeat(batch, 1, 1, 1)


@partition_windows.register_fake
def _(x: Tensor, side: int, shift: int) -> tuple[Tensor, Tensor]:
    count = get_ctx().new_dynamic_size()
    return x.new_empty(count, side * side, x.shape[3]), x.new_empty(count, 1, side * side, side * side)


@custom_op("compress::whole", mutates_args=())
def merge_windows(parts: Tensor, like: Tensor, side: int, shift: int) -> Tensor:
    """Undo `partition_windows`: merge windows into a map with the shape of `like`."""
    batch, height, width, _ = like.shape
    rows, columns = -(-height // side), -(-width // side)
    x = parts.view(batch, rows, columns, side, side, parts.shape[2]).transpose(2, 3)
    x = torch.roll(x.reshape(batch, rows * side, columns * side, -1), (shift, shift), (1, 2))
    return x[:, :height, :width].clone()


@merge_windows.register_fake
def _(parts: Tensor, like: Tensor, side: int, shift: int) -> Tensor:
    return torch.empty_like(like)


def _shift_regions(length: int, side: int, shift: int) -> Tensor:
    """Return, for each position along a shifted side, which of the three contiguous regions it is in."""
    position = torch.arange(length)
    return (position >= length - side).long() + (position >= length - shift).long() if shift else position * 0


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the translations to ONNX by operator, for `torch.onnx.export`."""
    from .custom_op_translations import TRANSLATIONS  # it imports onnxscript

    return {getattr(torch.ops.compress, name).default: function for name, function in TRANSLATIONS.items()}
