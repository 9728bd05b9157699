"""Boxes and masks as mmdet computes them, in operations that a graph of any image can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..exporters.operators import nms


def places(generator: Any, level: int, at: Tensor, width: Any) -> Tensor:
    """The priors at these numbers of a level whose map is so wide: boxes, or points."""
    count = generator.num_base_priors[level]
    cell, (across, down) = at // count, generator.strides[level]
    row = cell // torch.full((), width, dtype=cell.dtype, device=cell.device)
    x, y = (cell - row * width).float(), row.float()
    if hasattr(generator, "base_anchors"):
        corner = torch.stack([x * across, y * down], 1)
        anchors: Tensor = generator.base_anchors[level].to(x)
        return torch.cat([corner, corner], 1) + anchors[at % count]
    return torch.stack([(x + generator.offset) * across, (y + generator.offset) * down], 1)


def decode(coder: Any, priors: Tensor, deltas: Tensor, size: tuple[Any, Any]) -> Tensor:
    """Boxes from what a head says of priors, inside an image of this height and width."""
    if hasattr(coder, "stds"):
        deltas = deltas * deltas.new_tensor(coder.stds) + deltas.new_tensor(coder.means)
        centre, extent = (priors[:, :2] + priors[:, 2:]) * 0.5, priors[:, 2:] - priors[:, :2]
        most = float(np.abs(np.log(16 / 1000)))
        centre = centre + extent * deltas[:, :2]
        extent = extent * deltas[:, 2:].clamp(-most, most).exp()
        boxes = torch.cat([centre - extent * 0.5, centre + extent * 0.5], 1)
    else:
        boxes = torch.cat([priors - deltas[:, :2], priors + deltas[:, 2:]], 1)
    if not coder.clip_border:
        return boxes
    edge = torch.stack([torch.full((), side, dtype=boxes.dtype, device=boxes.device) for side in size[::-1]])
    return torch.minimum(boxes.clamp(min=0), edge.repeat(2))


def suppress(boxes: Tensor, scores: Tensor, groups: Tensor, config: Mapping[str, Any], count: int) -> Tensor:
    """Which boxes stay, best first, where boxes of other groups do not count."""
    if not config.get("class_agnostic", False):  # as far apart as mmdet moves them: the rounding is the same, too
        apart = torch.cat([boxes.flatten(), boxes.new_zeros(1)]).max() + 1
        boxes = boxes + (groups.to(boxes) * apart)[:, None]
    kept: Tensor = nms(boxes, scores, float(config["iou_threshold"]), count)
    return kept


def large(boxes: Tensor, least: float) -> Tensor:
    """Whether boxes are wider and higher than this; all are, of a negative number."""
    extent = boxes[:, 2:] - boxes[:, :2]
    return (extent > least).all(1) if least >= 0 else torch.ones_like(extent[:, 0], dtype=torch.bool)


def paste(masks: Tensor, boxes: Tensor, height: Any, width: Any) -> Tensor:
    """Masks of boxes as maps of the image: bilinear, which is a product with a matrix from either side."""
    rows = _weights(boxes[:, 1::2], height, masks.shape[1])
    columns = _weights(boxes[:, 0::2], width, masks.shape[2])
    return rows @ masks @ columns.transpose(1, 2)


def _weights(ends: Tensor, length: Any, count: int) -> Tensor:
    """How much of each of `count` samples between two ends is in every pixel of a line: (boxes, pixels, samples)."""
    start, extent = ends[:, :1], ends[:, 1:] - ends[:, :1]
    pixel = torch.arange(length, device=ends.device).to(ends) + 0.5
    where = torch.where(extent == 0, 0.5, (pixel - start) / extent) * count - 0.5
    return (1 - (where[:, :, None] - torch.arange(count, device=ends.device).to(ends)).abs()).clamp(min=0)
