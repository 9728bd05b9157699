"""Boxes and masks as mmdet computes them, in operations that an exported graph for any image size can contain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.exporters import nms


def priors_at(generator: Any, level: int, indices: Tensor, width: Any) -> Tensor:
    """Return the priors of a level at these indices: boxes of an anchor generator, points of a point generator.

    Args:
        width: width of the level's feature map.
    """
    count = generator.num_base_priors[level]
    cell, (x_stride, y_stride) = indices // count, generator.strides[level]
    row = cell // torch.full((), width, dtype=cell.dtype, device=cell.device)
    x, y = (cell - row * width).float(), row.float()
    if hasattr(generator, "base_anchors"):
        corner = torch.stack([x * x_stride, y * y_stride], 1)
        anchors: Tensor = generator.base_anchors[level].to(x)
        return torch.cat([corner, corner], 1) + anchors[indices % count]
    return torch.stack([(x + generator.offset) * x_stride, (y + generator.offset) * y_stride], 1)


def decode_boxes(coder: Any, priors: Tensor, deltas: Tensor, size: tuple[Any, Any]) -> Tensor:
    """Return the boxes that a head predicts as deltas of priors, clipped to an image of this height and width."""
    if hasattr(coder, "stds"):
        deltas = deltas * deltas.new_tensor(coder.stds) + deltas.new_tensor(coder.means)
        center, extent = (priors[:, :2] + priors[:, 2:]) * 0.5, priors[:, 2:] - priors[:, :2]
        max_log_ratio = float(np.abs(np.log(16 / 1000)))
        center = center + extent * deltas[:, :2]
        extent = extent * deltas[:, 2:].clamp(-max_log_ratio, max_log_ratio).exp()
        boxes = torch.cat([center - extent * 0.5, center + extent * 0.5], 1)
    else:
        boxes = torch.cat([priors - deltas[:, :2], priors + deltas[:, 2:]], 1)
    if not coder.clip_border:
        return boxes
    edge = torch.stack([torch.full((), side, dtype=boxes.dtype, device=boxes.device) for side in size[::-1]])
    return torch.minimum(boxes.clamp(min=0), edge.repeat(2))


def batched_nms(boxes: Tensor, scores: Tensor, groups: Tensor, config: Mapping[str, Any], count: int) -> Tensor:
    """Apply NMS within each group (class or level); return the indices of at most `count` boxes, best first."""
    if not config.get("class_agnostic", False):
        # Boxes of different groups are moved apart by the same offset as in mmdet, so that rounding is the same.
        offset = torch.cat([boxes.flatten(), boxes.new_zeros(1)]).max() + 1
        boxes = boxes + (groups.to(boxes) * offset)[:, None]
    kept: Tensor = nms(boxes, scores, float(config["iou_threshold"]), count)
    return kept


def larger_than(boxes: Tensor, min_size: float) -> Tensor:
    """Return which boxes are wider and higher than `min_size`; all of them if it is negative."""
    extent = boxes[:, 2:] - boxes[:, :2]
    return (extent > min_size).all(1) if min_size >= 0 else torch.ones_like(extent[:, 0], dtype=torch.bool)


def paste_masks(masks: Tensor, boxes: Tensor, height: Any, width: Any) -> Tensor:
    """Interpolate masks of boxes to masks of the image; bilinear, as a product with a matrix from either side."""
    rows = _interpolation_weights(boxes[:, 1::2], height, masks.shape[1])
    columns = _interpolation_weights(boxes[:, 0::2], width, masks.shape[2])
    return rows @ masks @ columns.transpose(1, 2)


def _interpolation_weights(ends: Tensor, length: Any, count: int) -> Tensor:
    """Return the weights of `count` samples between two ends for each pixel of a line: (boxes, pixels, samples)."""
    start, extent = ends[:, :1], ends[:, 1:] - ends[:, :1]
    pixel = torch.arange(length, device=ends.device).to(ends) + 0.5
    position = torch.where(extent == 0, 0.5, (pixel - start) / extent) * count - 0.5
    return (1 - (position[:, :, None] - torch.arange(count, device=ends.device).to(ends)).abs()).clamp(min=0)
