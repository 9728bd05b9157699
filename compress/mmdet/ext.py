"""What mmcv's compiled extension offers, on torchvision's kernels: it stands in as `mmcv._ext` where mmcv has none.

Names, arguments and tensors that are filled in place are those of mmcv's C++ functions. An op without a counterpart
is there all the same, since mmcv looks for the names of all when it is imported, and says so when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
import torchvision  # noqa: F401  (it registers its kernels)
from torch import Tensor

KERNELS = torch.ops.torchvision


class MissingOp(NotImplementedError):
    """An op that only a compiled mmcv has."""

    def __init__(self, name: str, what: str = "") -> None:
        super().__init__(
            f"mmcv.ops: {name}{what} is not among the ops that run on torchvision's kernels; expected a compiled mmcv. "
            "Remove mmcv-lite and install mmcv (mim install 'mmcv>=2.0.0rc4,<2.2', or build it from source)"
        )


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """The boxes that are kept, best first; a box is x2 - x1 + offset wide."""
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
    """Take the best box, lower the scores of those that overlap it (0: to zero, 1: linearly, 2: by a Gaussian), again.

    Boxes whose score falls below `min_score` are dropped. `dets` is filled with boxes and scores in that order.
    """
    low, high = boxes[:, :2], boxes[:, 2:] + offset
    area = (high - low).prod(1)
    left, value = torch.arange(len(boxes), device=boxes.device), scores.clone()
    order: list[Tensor] = []
    while len(left):
        best = left[value[left].argmax()]
        dets[len(order), :4], dets[len(order), 4] = boxes[best], value[best]
        order.append(best)
        left = left[left != best]
        shared = (torch.minimum(high[best], high[left]) - torch.maximum(low[best], low[left])).clamp(min=0).prod(1)
        overlap = shared / (area[best] + area[left] - shared)
        if method == 2:
            factor = torch.exp(-(overlap**2) / sigma)
        else:
            factor = torch.where(overlap >= iou_threshold, 1 - overlap if method == 1 else 0.0, 1.0)
        value[left] *= factor
        left = left[value[left] >= min_score]
    return torch.stack(order) if order else left


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
    """
    Raises:
        MissingOp: it is to take the largest of a bin, not the mean.
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
    place = (spatial_scale, aligned_height, aligned_width, *grad_input.shape, sampling_ratio, aligned)
    grad_input.add_(KERNELS._roi_align_backward(grad_output, rois.to(grad_output.dtype), *place))


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """-alpha (1 - p)^gamma log p for the class of the target, -(1 - alpha) p^gamma log(1 - p) for all others."""
    output.copy_(_focal(input, target, weight, gamma, alpha))


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    with torch.enable_grad():
        x = input.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(_focal(x, target, weight, gamma, alpha).sum(), x)
    grad_input.copy_(gradient)


def _focal(x: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float) -> Tensor:
    hit = F.one_hot(target, x.shape[1] + 1)[:, : x.shape[1]].to(x.dtype)  # the last class is the background
    p = x.sigmoid()
    factor = hit * alpha * (1 - p) ** gamma + (1 - hit) * (1 - alpha) * p**gamma
    loss = factor * F.binary_cross_entropy_with_logits(x, hit, reduction="none")
    return loss * weight[target.clamp(max=len(weight) - 1)][:, None] if len(weight) else loss


OPS: tuple[Callable[..., Any], ...] = (
    nms,
    softnms,
    roi_align_forward,
    roi_align_backward,
    sigmoid_focal_loss_forward,
    sigmoid_focal_loss_backward,
)


class Extension(ModuleType):
    """The module that mmcv finds: the ops above, and for every other name a function that says it is missing."""

    def __init__(self) -> None:
        super().__init__("mmcv._ext", __doc__)
        self.__spec__ = __spec__
        for op in OPS:
            setattr(self, op.__name__, op)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise MissingOp(name)

        return missing
