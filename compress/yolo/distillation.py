"""Distillation of a YOLO: the outputs of its head are drawn to those of the dense network.

    classes      binary cross-entropy of the class probabilities, softened with T, to the teacher's
    boxes        KL divergence of the distributions of the four sides (Zheng et al., Localization distillation, CVPR
                 2022, eq. 3), or the L1 distance of the sides where the head predicts them directly
    others       L1 distance of mask coefficients, keypoints and angles

Each is a mean over positions, weighted by the teacher's largest class probability w there: most of them are background.

    loss = sum_i w_i (classes_i + boxes_i + others_i) / sum_i w_i,   w_i = max_c sigmoid(t_ic)

For classification it is KL(softmax(t / T) || softmax(s / T)).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDES = 4  # of a box
NOT_PER_POSITION = ("feats", "proto")


def raw_predictions(outputs: Any) -> Any:
    """Return the raw predictions of a network in either mode; in eval mode the decoded ones come before them."""
    return outputs[1] if isinstance(outputs, tuple) else outputs


def distillation_loss(student: Any, teacher: Any, temperature: float) -> Tensor:
    """Return the distance of the student's raw predictions from the teacher's.

    >>> y = {"boxes": torch.randn(1, 4, 6), "scores": torch.randn(1, 3, 6)}
    >>> worse = {**y, "boxes": y["boxes"] + 1}
    >>> bool(distillation_loss(worse, y, 1.0) > distillation_loss(y, y, 1.0))
    True
    """
    student, teacher = raw_predictions(student), raw_predictions(teacher)
    if isinstance(teacher, Tensor):  # logits of a classifier
        p, q = (F.log_softmax(y.float() / temperature, 1) for y in (teacher, student))
        return F.kl_div(q, p, reduction="batchmean", log_target=True)
    if "one2many" in teacher:  # the two heads of an end-to-end network
        parts = [distillation_loss(student[name], teacher[name], temperature) for name in ("one2many", "one2one")]
        return torch.stack(parts).mean()
    return _head_loss(student, teacher, temperature)


def _head_loss(student: Mapping[str, Tensor], teacher: Mapping[str, Tensor], temperature: float) -> Tensor:
    weight = teacher["scores"].float().sigmoid().amax(1)  # (batch, positions)
    logits, targets = (y["scores"].float() / temperature for y in (student, teacher))
    distance = F.binary_cross_entropy_with_logits(logits, targets.sigmoid(), reduction="none").sum(1)
    distance = distance + _box_distance(student["boxes"].float(), teacher["boxes"].float(), temperature)
    for name, target in teacher.items():
        is_per_position = isinstance(target, Tensor) and target.shape[-1] == weight.shape[-1]
        if name not in ("boxes", "scores", *NOT_PER_POSITION) and is_per_position:
            distance = distance + (student[name].float() - target.float()).abs().flatten(1, -2).mean(1)
    return (distance * weight).sum() / weight.sum()


def _box_distance(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the distance of the boxes at each position; inputs have shape (batch, 4 * bins, positions)."""
    if student.shape[1] == SIDES:
        return (student - teacher).abs().mean(1)
    p, q = (F.log_softmax(y.reshape(len(y), SIDES, -1, y.shape[-1]) / temperature, 2) for y in (teacher, student))
    return F.kl_div(q, p, reduction="none", log_target=True).sum(2).mean(1)


class TaughtCriterion:
    """A criterion of Ultralytics with the distillation loss added; it stands in the place of the network's own."""

    def __init__(self, criterion: Any, teacher: nn.Module, weight: float, temperature: float) -> None:
        self.criterion, self.teacher = criterion, teacher
        self.weight, self.temperature = weight, temperature

    def __call__(self, predictions: Any, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        losses, items = self.criterion(predictions, batch)
        with torch.no_grad():
            teacher = self.teacher(batch["img"])
        distance = self.weight * distillation_loss(predictions, teacher, self.temperature)
        # Ultralytics' losses are sums over the images of a batch; only that of classification is a mean.
        images = 1 if isinstance(raw_predictions(teacher), Tensor) else len(batch["img"])
        return losses.sum() + images * distance, {**items, "distil": distance.detach()}

    def update(self) -> None:
        """End an epoch: losses of end-to-end networks change their weights."""
        if hasattr(self.criterion, "update"):
            self.criterion.update()
