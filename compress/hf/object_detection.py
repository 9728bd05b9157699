"""ObjectDetection: Hugging Face models that predict a set of boxes, such as DETR, YOLOS and RT-DETR."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import BatchError
from compress.formatting import describe_value
from compress.training import average_precision_over_processes, can_measure_boxes, distillation

from .model_loss import LossSum, ModelLoss

MAX_DETECTIONS = 100  # per image, as COCO counts them
MOST_RELATIVE = 2.0  # a larger value of a box is in pixels
BOX_WEIGHT = 5.0  # of the distance of boxes in distillation, as in DETR's own loss


class ObjectDetection(ModelLoss):
    """The model's own loss; AP of boxes; distillation of classes and boxes.

    Queries of student and teacher are matched one to one by the distance of their predictions, because models that
    propose their queries order them by score. Then the classes are compared by KL divergence and the boxes by their L1
    distance. Queries count by the probability that the teacher gives to an object.

    AP is that of COCO and needs pycocotools; without it the metric is the negative loss.
    """

    distill_weight = 8.0

    def __init__(
        self, model: PreTrainedModel, train: Iterable[Any] | None = None, val: Iterable[Any] | None = None
    ) -> None:
        super().__init__(model, train, val)
        self._classes = len(model.config.id2label or ())

    def forward(self, model: nn.Module, batch: Any) -> Any:
        arguments = self._call.arguments(batch)
        if arguments.get("labels") is not None:
            check_labels(arguments["labels"], self._classes)
        return model(**arguments)

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        targets, target_boxes = teacher["logits"].float(), teacher["pred_boxes"].float()
        count = targets.shape[1]  # in training, queries with noise may come first
        logits, boxes = outputs["logits"][:, -count:].float(), outputs["pred_boxes"][:, -count:].float()
        order = match_queries(self._probabilities(logits), boxes, self._probabilities(targets), target_boxes)
        logits, boxes = (t.gather(1, order[..., None].expand(-1, -1, t.shape[-1])) for t in (logits, boxes))
        if self._is_softmax(targets):
            classes = distillation(logits, targets, temperature)
            confidence = 1 - targets.softmax(-1)[..., -1]
        else:  # each class is a decision of its own
            pairs = [torch.stack([torch.zeros_like(t), t], -1) for t in (logits, targets)]
            classes = distillation(pairs[0], pairs[1], temperature) * targets.shape[-1]
            confidence = targets.sigmoid().amax(-1)
        distance = (boxes - target_boxes).abs().sum(-1)
        mean_distance: Tensor = (confidence * distance).sum() / confidence.sum().clamp_min(1e-6)
        # The gradient of the divergence is proportional to 1 / T^2, for which users increase its weight.
        return classes + BOX_WEIGHT / temperature**2 * mean_distance

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        losses = LossSum()
        detections: list[dict[str, Tensor]] = []
        truth: list[dict[str, Tensor]] = []
        for batch in batches:
            outputs = self.forward(model, batch)
            losses.add(self.loss(outputs, batch), self.count_targets(batch))
            detections += self.detections(outputs)
            truth += map(_target, batch["labels"])
        loss = losses.mean()
        if not can_measure_boxes():
            return {"minus_loss": -loss}
        on_cpu = ([*map(_on_cpu, images)] for images in (detections, truth))
        return {**average_precision_over_processes(*on_cpu), "loss": loss}

    def detections(self, outputs: Any) -> list[dict[str, Tensor]]:
        """Return boxes as corners relative to the image, scores and labels of each image, the best first."""
        scores = self._probabilities(outputs["logits"].float())
        if self._is_softmax(scores):  # a query has one class
            scores, classes = scores[..., :-1].max(-1)
            best, query = scores.topk(min(MAX_DETECTIONS, scores.shape[1]))
            labels = classes.gather(1, query)
        else:
            best, index = scores.flatten(1).topk(min(MAX_DETECTIONS, scores[0].numel()))
            query, labels = index // scores.shape[-1], index % scores.shape[-1]
        boxes = outputs["pred_boxes"].float().gather(1, query[..., None].expand(-1, -1, 4))
        return [
            {"boxes": _corners(box), "scores": score, "labels": label}
            for box, score, label in zip(boxes, best, labels, strict=True)
        ]

    def _is_softmax(self, logits: Tensor) -> bool:
        """Return whether there is a class for "no object", as DETR's and YOLOS' loss has it."""
        return logits.shape[-1] == self._classes + 1

    def _probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self._is_softmax(logits) else logits.sigmoid()


def check_labels(labels: Any, classes: int) -> None:
    """Check the labels of a batch.

    Args:
        classes: of the model.

    Raises:
        BatchError: they are not those of DETR's image processor.
    """
    for label in labels if isinstance(labels, (list, tuple)) else [labels]:
        if problem := _label_problem(label, classes):
            raise BatchError(
                f"labels: expected for each image a dict with class_labels (n,) and boxes (n, 4), as DETR's image "
                f"processor makes them: center and size, relative to the image; {problem}"
            )


def _label_problem(label: Any, classes: int) -> str:
    """Return what is wrong with the label of an image; "" if nothing is."""
    if not isinstance(label, Mapping) or not {"class_labels", "boxes"} <= label.keys():
        return f"got {describe_value(label)}"
    numbers, boxes = label["class_labels"], label["boxes"]
    if not isinstance(boxes, Tensor) or boxes.ndim != 2 or boxes.shape[1] != 4 or not boxes.is_floating_point():
        return f"boxes are {describe_value(boxes)}. Give floats of shape (n, 4), (0, 4) if there are none"
    if not isinstance(numbers, Tensor) or numbers.shape != boxes.shape[:1] or numbers.is_floating_point():
        return f"class_labels are {describe_value(numbers)}. Give a class number for each of {len(boxes)} boxes"
    if not len(boxes) or (boxes.device.type != "cpu" and torch.is_grad_enabled()):
        return ""  # looking at values on a device would wait for it
    if float(boxes.abs().max()) > MOST_RELATIVE:
        return f"a box has the value {float(boxes.abs().max()):g}. Divide pixels by the width and height of the image"
    if int(numbers.min()) < 0 or int(numbers.max()) >= classes:
        bad = int(numbers.min()) if int(numbers.min()) < 0 else int(numbers.max())
        return f"class {bad} is not one of the model's {classes}, 0 to {classes - 1}. Set its num_labels, or renumber"
    return ""


@torch.no_grad()
def match_queries(scores: Tensor, boxes: Tensor, target_scores: Tensor, target_boxes: Tensor) -> Tensor:
    """Return for each query of the teacher the query of the student that is matched to it, one to one.

    The cost is the L1 distance of boxes and class probabilities. Equal predictions match by their position.

    >>> boxes = torch.tensor([[[0.1, 0.1, 0.2, 0.2], [0.8, 0.8, 0.1, 0.1]]])
    >>> scores = torch.tensor([[[0.9], [0.8]]])
    >>> match_queries(scores, boxes, scores.flip(1), boxes.flip(1))
    tensor([[1, 0]])
    """
    costs = torch.cdist(target_boxes, boxes, 1) + torch.cdist(target_scores, scores, 1)
    columns = [linear_sum_assignment(cost)[1] for cost in costs.cpu().numpy()]
    return torch.as_tensor([column.tolist() for column in columns], device=boxes.device)


def _target(label: Mapping[str, Tensor]) -> dict[str, Tensor]:
    target = {"boxes": _corners(label["boxes"].float()), "labels": label["class_labels"].long()}
    return target | ({"iscrowd": label["iscrowd"]} if "iscrowd" in label else {})


def _corners(boxes: Tensor) -> Tensor:
    """Return boxes of (center, size) as corners. They are relative to the image, which does not change their IoU."""
    centers, extents = boxes[:, :2], boxes[:, 2:]
    return torch.cat([centers - extents / 2, centers + extents / 2], 1)


def _on_cpu(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in values.items()}
