"""The ops of mmcv's compiled extension `mmcv._ext`, implemented on torchvision's kernels.

Names, arguments and outputs filled in place are those of mmcv's C++ functions. mmcv looks up the names of all ops when
it is imported, so ops that are not implemented exist, too; they raise `MissingOp` when called.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
import torchvision  # noqa: F401  (it registers the kernels)
from torch import Tensor

KERNELS = torch.ops.torchvision


class MissingOp(NotImplementedError):
    """An op that only a compiled mmcv provides."""

    def __init__(self, name: str, option: str = "") -> None:
        super().__init__(
            f"mmcv.ops: {name}{option} is not implemented on torchvision's kernels; it needs a compiled mmcv. "
            "Remove mmcv-lite and install mmcv (mim install 'mmcv>=2.0.0rc4,<2.2', or build it from source)"
        )


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Return the indices of the boxes that are kept, best first; a box is x2 - x1 + offset wide."""
    if offset:
        boxes = boxes + boxes.new_tensor([0, 0, offset, offset])
    kept: Tensor = KERNELS.nms(boxes, scores, iou_threshold)
    return kept


def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Repeatedly take the best box and lower the scores of those that overlap it; return the order of the boxes.

    Boxes with a score below `min_score` are dropped. `dets` is filled with boxes and scores in the returned order.

    Args:
        method: how scores are lowered: 0 to zero, 1 linearly, 2 by a Gaussian.
    """
    low, high = boxes[:, :2], boxes[:, 2:] + offset
    area = (high - low).prod(1)
    remaining, value = torch.arange(len(boxes), device=boxes.device), scores.clone()
    order: list[Tensor] = []
    while len(remaining):
        best = remaining[value[remaining].argmax()]
        dets[len(order), :4], dets[len(order), 4] = boxes[best], value[best]
        order.append(best)
        remaining = remaining[remaining != best]
        corners = torch.minimum(high[best], high[remaining]), torch.maximum(low[best], low[remaining])
        intersection = (corners[0] - corners[1]).clamp(min=0).prod(1)
        iou = intersection / (area[best] + area[remaining] - intersection)
        if method == 2:
            factor = torch.exp(-(iou**2) / sigma)
        else:
            factor = torch.where(iou >= iou_threshold, 1 - iou if method == 1 else 0.0, 1.0)
        value[remaining] *= factor
        remaining = remaining[value[remaining] >= min_score]
    return torch.stack(order) if order else remaining


def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Fill `output` with the RoIAlign of the input.

    Raises:
        MissingOp: `pool_mode` is 0: the maximum of a bin, not the mean.
    """
    if pool_mode == 0:
        raise MissingOp("roi_align", " with pool_mode='max'")
    size = (aligned_height, aligned_width)
    output.copy_(KERNELS.roi_align(input, rois.to(input.dtype), spatial_scale, *size, sampling_ratio, aligned))


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Add the gradient of the input to `grad_input`."""
    geometry = (spatial_scale, aligned_height, aligned_width, *grad_input.shape, sampling_ratio, aligned)
    grad_input.add_(KERNELS._roi_align_backward(grad_output, rois.to(grad_output.dtype), *geometry))


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Fill `output` with the focal loss.

    -alpha (1 - p)^gamma log p for the class of the target, -(1 - alpha) p^gamma log(1 - p) for all others.
    """
    output.copy_(_focal_loss(input, target, weight, gamma, alpha))


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Fill `grad_input` with the gradient of the focal loss."""
    with torch.enable_grad():
        x = input.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(_focal_loss(x, target, weight, gamma, alpha).sum(), x)
    grad_input.copy_(gradient)


def _focal_loss(x: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float) -> Tensor:
    is_target = F.one_hot(target, x.shape[1] + 1)[:, : x.shape[1]].to(x.dtype)  # the last class is the background
    p = x.sigmoid()
    factor = is_target * alpha * (1 - p) ** gamma + (1 - is_target) * (1 - alpha) * p**gamma
    loss = factor * F.binary_cross_entropy_with_logits(x, is_target, reduction="none")
    return loss * weight[target.clamp(max=len(weight) - 1)][:, None] if len(weight) else loss


IMPLEMENTED_OPS: tuple[Callable[..., Any], ...] = (
    nms,
    softnms,
    roi_align_forward,
    roi_align_backward,
    sigmoid_focal_loss_forward,
    sigmoid_focal_loss_backward,
)


class MmcvExtension(ModuleType):
    """The module `mmcv._ext`: the ops above; any other name is a function that raises MissingOp."""

    def __init__(self) -> None:
        super().__init__("mmcv._ext", __doc__)
        self.__spec__ = __spec__
        for op in IMPLEMENTED_OPS:
            setattr(self, op.__name__, op)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise MissingOp(name)

        return missing
