"""Losses of segmentation: cross entropy and Dice loss of each image, and the confusion matrix of its pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch_fields import IGNORED

TINY = 1e-12  # in place of a sum over no pixels


def image_losses(
    logits: Tensor, target: Tensor, *, cross_entropy: float, dice: float, class_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the loss of each image and its weight, so that means over images do not depend on how they are batched.

        l_n = cross_entropy * sum_p w_p CE_p / w_n + dice * Dice_n,  w_n = sum_p w_p

    p runs over the pixels of image n that are not ignored; w_p is 1, or the weight of the class at p.
    """
    weights = pixel_weights(target, class_weights).to(logits.dtype)
    image_weights = weights.flatten(1).sum(1)
    losses = torch.zeros_like(image_weights)
    if cross_entropy:
        errors = F.cross_entropy(logits, target, ignore_index=IGNORED, reduction="none")
        losses = losses + cross_entropy * (errors * weights).flatten(1).sum(1) / image_weights.clamp_min(TINY)
    if dice:
        losses = losses + dice * dice_losses(logits, target)
    return losses, image_weights


def pixel_weights(target: Tensor, class_weights: Tensor | None) -> Tensor:
    """Return the weight of each pixel: 0 where the target is ignored, else 1 or that of its class."""
    counted = target != IGNORED
    if class_weights is None:
        return counted
    return class_weights.to(target.device)[target.clamp_min(0)] * counted


def dice_losses(logits: Tensor, target: Tensor) -> Tensor:
    """Return the soft Dice loss of each image, over the classes that are in its mask.

        1 - mean_c 2 sum_p q_pc y_pc / (sum_p q_pc + sum_p y_pc),  q = softmax(logits)

    Sums are over the pixels that are not ignored. An image without such pixels has the loss 1.
    """
    counted = (target != IGNORED).to(logits.dtype)
    q = logits.softmax(1) * counted[:, None]
    classes = target.clamp_min(0).flatten(1)
    empty = q.new_zeros(q.shape[:2])
    q_of_target = q.gather(1, target.clamp_min(0)[:, None])[:, 0]
    common = empty.scatter_add(1, classes, q_of_target.flatten(1))
    pixels = empty.scatter_add(1, classes, counted.flatten(1))
    coefficients = 2 * common / (q.flatten(2).sum(2) + pixels).clamp_min(TINY)
    return 1 - coefficients.sum(1) / (pixels > 0).sum(1).clamp_min(1)


def confusion_matrix(predicted: Tensor, target: Tensor, classes: int) -> Tensor:
    """Return the number of pixels by target (rows) and prediction (columns), as a flat vector in double precision."""
    counted = target != IGNORED
    positions = torch.where(counted, target * classes + predicted, 0).flatten()
    counts = torch.zeros(classes**2, dtype=torch.float64, device=target.device)
    return counts.index_add_(0, positions, counted.flatten().double())


def mean_iou(confusion: Tensor) -> float:
    """Return the mean intersection over union of the classes that are in the targets or the predictions."""
    hits = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - hits
    return float((hits[union > 0] / union[union > 0]).mean())
