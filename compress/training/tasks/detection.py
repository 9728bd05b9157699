"""Detection: torchvision's detectors, with their own losses, average precision and distillation of feature maps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import BatchError
from compress.formatting import describe_value
from compress.recipe import Recipe

from .average_precision import INSTALL, average_precision_over_processes, can_measure
from .batch_fields import INPUTS, TARGETS, pick_field
from .detector_modes import check_detector, feature_distance, recording_features, returning_losses
from .labelled_task import LabelledTask

COLLATE = "DataLoader(dataset, batch_size=2, collate_fn=lambda batch: tuple(zip(*batch)))"
MEASURED = ("boxes", "labels", "scores", "iscrowd", "area")


@dataclass
class DetectorOutputs:
    """Losses of a detector on a batch, and the feature maps of its backbone."""

    losses: dict[str, Tensor]
    maps: list[Tensor]


class Detection(LabelledTask):
    """Detect objects with torchvision's detectors: their losses, AP of boxes, distillation of feature maps.

    The loss is the sum of the losses that the detector returns in training mode; they are computed in eval mode, too.
    The dense detector teaches by the feature maps of its backbone: the distance is the mean over images and maps of
    ||student - teacher||² / ||teacher||². AP is that of COCO and needs pycocotools.

    A batch is a pair of lists: images (3, height, width) from 0 to 1, and targets with `boxes` (x1, y1, x2, y2) and
    `labels` (from 1; 0 is the background), as in torchvision's references. Without labels a detector has no loss: use
    a search without data, and `compensate: least_squares` with `calibration`.

    Args:
        train: loader of training batches.
        val: loader of validation batches.
        input: where the images are in a batch: a key, a position or a function. Default: the first item of a tuple, or
            the usual names of a dict.
        target: where the targets are, likewise.
    """

    distill_weight = 1.0

    def inputs(self, batch: Any) -> list[Tensor]:
        """Return the first image, as the list that a detector takes: costs are those of one image."""
        return self.images(batch)[:1]

    def forward(self, model: nn.Module, batch: Any) -> DetectorOutputs:
        images, targets = self.split(batch)
        check_detector(model)
        with recording_features(model) as maps, returning_losses(model):
            losses = model(images, targets)
        if not isinstance(losses, Mapping) or not all(isinstance(value, Tensor) for value in losses.values()):
            raise BatchError(
                f"the model: expected a dict of losses from {type(model).__name__}(images, targets) in training mode; "
                f"got {describe_value(losses)}"
            )
        return DetectorOutputs(dict(losses), maps)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return torch.stack([loss.reshape(()) for loss in outputs.losses.values()]).sum()

    def count_targets(self, batch: Any) -> float:
        """Return the number of images, over which the losses are means.

        Those of FCOS and SSD are means over the boxes that are matched, so for them this is an approximation.
        """
        return float(len(self.images(batch)))

    @torch.no_grad()
    def teach(self, model: nn.Module, batch: Any) -> list[Tensor]:
        """Return the feature maps of the dense detector; its heads do not run."""
        check_detector(model)
        detector: Any = model
        with recording_features(model) as maps, returning_losses(model):
            detector.backbone(detector.transform(self.images(batch))[0].tensors)
        return maps

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        return feature_distance(outputs.maps if isinstance(outputs, DetectorOutputs) else outputs, teacher)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Return AP over IoU 0.5 to 0.95, at 0.5 and at 0.75."""
        detections: list[dict[str, Tensor]] = []
        truth: list[dict[str, Tensor]] = []
        for batch in batches:
            images, targets = self.split(batch)
            detections += map(_measured, model(images))
            truth += map(_measured, targets)
        return average_precision_over_processes(detections, truth)

    def objections(self, recipe: Recipe) -> list[str]:
        """Return that pycocotools is missing, if there is something to measure."""
        return [f"val: {INSTALL}, or leave val out"] if self.val is not None and not can_measure() else []

    def images(self, batch: Any) -> list[Tensor]:
        """Return the images of a batch, with or without targets.

        Raises:
            BatchError: there are none.
        """
        images = batch
        if self._input is not None or isinstance(batch, Mapping) or self._is_pair(batch):
            try:
                images = pick_field(batch, self._input, 0, INPUTS)
            except (LookupError, TypeError, AttributeError) as error:
                raise _mismatch(batch, f"{type(error).__name__}: {error}") from error
        images = list(images) if isinstance(images, (list, tuple, Tensor)) else [images]
        if not images or not all(isinstance(image, Tensor) and image.ndim == 3 for image in images):
            raise _mismatch(batch, "images must be a list of tensors (3, height, width)")
        return images

    def split(self, batch: Any) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Return images and targets of a batch.

        Raises:
            BatchError: they are not found, or are not images and boxes.
        """
        images = self.images(batch)
        if self._target is None and not isinstance(batch, Mapping) and not self._is_pair(batch):
            raise _mismatch(batch, "there are no targets")
        try:
            targets = pick_field(batch, self._target, 1, TARGETS)
        except (LookupError, TypeError, AttributeError) as error:
            raise _mismatch(batch, f"there are no targets: {type(error).__name__}: {error}") from error
        if not isinstance(targets, (list, tuple)) or len(targets) != len(images):
            raise _mismatch(batch, "targets must be a list, with a dict of boxes and labels for each image")
        for target in targets:
            if problem := _target_problem(target):
                raise _mismatch(batch, problem)
        return images, [dict(target) for target in targets]

    @staticmethod
    def _is_pair(batch: Any) -> bool:
        """Return whether a batch is a pair of images and targets, not a list of images."""
        return isinstance(batch, (tuple, list)) and len(batch) > 1 and not isinstance(batch[1], Tensor)


def _target_problem(target: Any) -> str:
    """Return what is wrong with the target of an image; "" if nothing is."""
    if not isinstance(target, Mapping) or not {"boxes", "labels"} <= target.keys():
        problem = f"a target must be a dict of boxes and labels; one is {describe_value(target)}"
        if isinstance(target, (list, tuple)):  # as CocoDetection gives them
            problem += ". torchvision.datasets.wrap_dataset_for_transforms_v2(dataset) converts COCO's annotations"
        return problem
    boxes, labels = target["boxes"], target["labels"]
    if not isinstance(boxes, Tensor) or boxes.ndim != 2 or boxes.shape[1] != 4:
        return f"boxes must have shape (n, 4), (0, 4) if there are none; one is {describe_value(boxes)}"
    if not isinstance(labels, Tensor) or labels.shape != boxes.shape[:1] or labels.is_floating_point():
        return f"labels must be one class number for each of {len(boxes)} boxes; they are {describe_value(labels)}"
    return ""


def _measured(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what average precision needs of detections or targets, on the CPU."""
    return {name: values[name].detach().cpu() for name in MEASURED if name in values}


def _mismatch(batch: Any, reason: str) -> BatchError:
    return BatchError(
        "the loader: expected batches of (list of images, list of targets with boxes and labels); got "
        f"{describe_value(batch)} ({reason}). In general:\n"
        f"    train = {COLLATE}\n"
        "    task = compress.Detection(train, val)  # or input=lambda batch: ..., target=lambda batch: ...\n"
        "A detector has no loss without boxes. Without them: search magnitude, and compensate with calibration=IMAGES"
    )
