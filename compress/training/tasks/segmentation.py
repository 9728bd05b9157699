"""Segmentation: a class for each pixel, with cross entropy, Dice loss, mean IoU and distillation of every pixel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.distributed import all_gather_object, all_reduce_sum
from compress.errors import BatchError
from compress.formatting import describe_value

from ..distillation_losses import distillation
from .batch_fields import IGNORED, MASKS, Pick, describe_mismatch, single_sample, split_fields
from .labelled_task import LabelledTask
from .pixel_losses import TINY, confusion_matrix, image_losses, mean_iou, pixel_weights

VOID = 255  # usual mark of pixels without a class


class Segmentation(LabelledTask):
    """Segment images: cross entropy and Dice loss, mean IoU, KL divergence of the logits of each pixel.

        loss = sum_n w_n (cross_entropy * CE_n + dice * Dice_n) / sum_n w_n + auxiliary * (the same of the output "aux")

    w_n is the number of pixels of image n that are not ignored, or the sum of their class weights. So the loss is a
    mean over pixels, and N processes, accumulated batches and micro-batches train like one large batch.

    The model returns logits of shape (images, classes, height, width): its output, the `out` or `logits` in it, or
    the first of a tuple. They are resized to the mask if their size is another. One output per pixel is the logit of
    class 1 against class 0.

    Args:
        train: loader of training batches.
        val: loader of validation batches.
        input: where the images are in a batch: a key, a position or a function. Default: the first item of a tuple, or
            the usual names of a dict.
        target: where the masks are, likewise. Masks hold class numbers: (images, height, width), or with a channel.
        cross_entropy: weight of the cross entropy.
        dice: weight of the Dice loss, a mean over images and the classes in them.
        class_weights: weight of each class in the cross entropy.
        auxiliary: weight of the loss of the output "aux" of torchvision's networks, which is trained but not measured.
        ignore: values of pixels without a class; -100 is one in any case. Default: 255.

    Raises:
        ValueError: a weight is negative, or all are zero.
    """

    distill_weight = 8.0

    def __init__(
        self,
        train: Iterable[Any] | None = None,
        val: Iterable[Any] | None = None,
        *,
        input: Pick | None = None,
        target: Pick | None = None,
        cross_entropy: float = 1.0,
        dice: float = 0.0,
        class_weights: Sequence[float] | Tensor | None = None,
        auxiliary: float = 0.4,
        ignore: int | Sequence[int] | None = None,
    ) -> None:
        weights = [] if class_weights is None else [float(w) for w in class_weights]
        if min(cross_entropy, dice, auxiliary, *weights) < 0 or cross_entropy + dice == 0:
            raise ValueError(
                "Segmentation: expected weights of 0 or more, and cross_entropy or dice above 0; got cross_entropy="
                f"{cross_entropy}, dice={dice}, auxiliary={auxiliary}, class_weights={class_weights}"
            )
        super().__init__(train, val, input=input, target=target)
        self._cross_entropy, self._dice, self._auxiliary = cross_entropy, dice, auxiliary
        self._class_weights = torch.tensor(weights) if weights else None
        self._void_is_default = ignore is None
        self._ignore = (VOID,) if ignore is None else (ignore,) if isinstance(ignore, int) else tuple(ignore)

    def describe(self) -> dict[str, Any]:
        weights = None if self._class_weights is None else self._class_weights.tolist()
        settings = {"cross_entropy": self._cross_entropy, "dice": self._dice, "auxiliary": self._auxiliary}
        return settings | {"class_weights": weights, "ignore": list(self._ignore)}

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(self.inputs(batch))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        target, logits = self.split(batch)[1], pixel_logits(outputs)
        self._check_void(batch, logits)
        loss = _weighted_mean(*self._image_losses(logits, target))
        auxiliary = outputs.get("aux") if isinstance(outputs, Mapping) else None
        if isinstance(auxiliary, Tensor) and self._auxiliary:
            loss = loss + self._auxiliary * _weighted_mean(*self._image_losses(auxiliary, target))
        return loss

    def counted_pixels(self, batch: Any) -> Tensor:
        """Return which pixels of the masks are not ignored."""
        return self.split(batch)[1] != IGNORED

    def count_targets(self, batch: Any) -> float:
        """Return the number of pixels that are not ignored, or the sum of their class weights."""
        return float(pixel_weights(self.split(batch)[1], self._class_weights).sum())

    def reward(self, outputs: Any, batch: Any) -> Tensor:
        """Return the accuracy of the pixels, weighted as in the loss."""
        target = self.split(batch)[1]
        weights = pixel_weights(target, self._class_weights).double()
        predicted = self._fit(pixel_logits(outputs), target).argmax(1)
        return ((predicted == target) * weights).sum() / weights.sum().clamp_min(TINY)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean IoU of the classes, the accuracy of the pixels and the loss."""
        sums: Tensor | None = None  # the confusion matrix, then sums of losses and weights; on the device until the end
        classes = 0
        for batch in batches:
            target, logits = self.split(batch)[1], pixel_logits(self.forward(model, batch))
            self._check_void(batch, logits)
            losses, weights = self._image_losses(logits, target)
            fitted = self._fit(logits, target)
            classes = fitted.shape[1]
            loss_sums = torch.stack([(losses * weights).sum(), weights.sum()]).double()
            counts = torch.cat([confusion_matrix(fitted.argmax(1), target, classes), loss_sums])
            sums = counts if sums is None else sums + counts
        classes = max(all_gather_object(classes))
        sums = all_reduce_sum(sums, classes**2 + 2).cpu()
        confusion = sums[:-2].view(classes, classes)
        if not confusion.sum():
            raise BatchError("val: expected at least one pixel with a class; the loader gave none")
        metrics = {"miou": mean_iou(confusion), "pixel_accuracy": float(confusion.trace() / confusion.sum())}
        return metrics | {"loss": float(sums[-2] / sums[-1].clamp_min(TINY))}

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        """Return the KL divergence of each pixel's class probabilities, as a mean over pixels."""
        student, taught = (_two_classes(pixel_logits(value)).movedim(1, -1) for value in (outputs, teacher))
        return distillation(student, taught, temperature)

    def split(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return images, and masks of shape (images, height, width) in which ignored pixels are -100.

        Raises:
            BatchError: they are not found, or are not images and masks.
        """
        x, y = split_fields(batch, self._input, self._target, MASKS, "Segmentation")
        if x.ndim == 3 and y.ndim == 2:
            raise single_sample(batch)
        if y.ndim == 4 and y.shape[1] == 1:
            y = y[:, 0]
        if y.ndim != 3 or len(x) != len(y):
            reason = "targets must be one mask of class numbers per image, (images, height, width)"
            if y.ndim == 4:
                reason += f"; {y.shape[1]} channels, such as one-hot masks, become class numbers by mask.argmax(1)"
            raise describe_mismatch(batch, reason, "Segmentation", "mask")
        if y.is_floating_point() and not bool((y == y.round()).all()):
            raise BatchError(
                "masks: expected class numbers; got fractions. ToTensor divides by 255: read masks with "
                "PILToTensor, which does not"
            )
        y = y.long()
        for value in self._ignore:
            y = torch.where(y == value, IGNORED, y)
        return x, y

    def _image_losses(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return image_losses(
            self._fit(logits, target),
            self._check_target(target, logits),
            cross_entropy=self._cross_entropy,
            dice=self._dice,
            class_weights=self._class_weights,
        )

    @staticmethod
    def _fit(logits: Tensor, target: Tensor) -> Tensor:
        """Return logits of at least two classes, in the size of the mask and in single precision or better."""
        logits = _two_classes(logits if logits.dtype == torch.float64 else logits.float())
        if logits.shape[2:] == target.shape[1:]:
            return logits
        return F.interpolate(logits, target.shape[1:], mode="bilinear", align_corners=False)

    def _check_void(self, batch: Any, logits: Tensor) -> None:
        """Check that masks of one class do not mark it by 255.

        Raises:
            BatchError: the model has one output, the mask has pixels of 255, and nobody said that they are ignored.
        """
        if not self._void_is_default or logits.shape[1] > 1:
            return
        mask = split_fields(batch, self._input, self._target, MASKS, "Segmentation")[1]
        if (mask.device.type == "cpu" or not torch.is_grad_enabled()) and bool((mask == VOID).any()):
            raise BatchError(
                f"masks: expected 0 and 1, because the model has one output; got {VOID}. If it marks the class: "
                f"compress.Segmentation(train, val, target=lambda batch: batch[1] // {VOID}). If it marks pixels "
                f"without a class: ignore={VOID}"
            )

    def _check_target(self, target: Tensor, logits: Tensor) -> Tensor:
        """Return the target.

        Raises:
            BatchError: a pixel is not one of the model's classes, or there are not as many class weights as classes.
        """
        classes = max(2, logits.shape[1])
        if self._class_weights is not None and len(self._class_weights) != classes:
            raise BatchError(
                f"class_weights: expected one for each of {classes} classes; got {len(self._class_weights)}"
            )
        self._check_classes(target, logits.shape[1])
        return target

    @staticmethod
    def _check_classes(target: Tensor, outputs: int) -> None:
        """Check that each pixel that is not ignored is one of the model's classes.

        Raises:
            BatchError: one is not.
        """
        if target.device.type != "cpu" and torch.is_grad_enabled():
            return  # looking here would wait for the device
        classes = max(2, outputs)
        bad = target[((target < 0) | (target >= classes)) & (target != IGNORED)]
        if len(bad):
            value = int(bad[0])
            raise BatchError(
                f"masks: expected classes 0 to {classes - 1}, because the model has {outputs} outputs; got {value}. "
                f"Give the model an output for each class, and number the classes from 0. If {value} marks pixels "
                f"without a class: compress.Segmentation(train, val, ignore={value})"
            )


def pixel_logits(outputs: Any) -> Tensor:
    """Return the logits of each pixel in a model's output: itself, its `out` or `logits`, or the first of a tuple.

    Raises:
        BatchError: the output has no logits of shape (images, classes, height, width).
    """
    logits = outputs
    if isinstance(outputs, Mapping):
        logits = next((outputs[name] for name in ("out", "logits") if name in outputs), None)
    logits = getattr(logits, "logits", logits)
    if isinstance(logits, (tuple, list)) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or logits.ndim != 4:
        raise BatchError(
            "the model: expected logits of shape (images, classes, height, width), or a dict with `out` or `logits`; "
            f"got {describe_value(logits if isinstance(logits, Tensor) else outputs)}. Other outputs need your own "
            "task: with inputs, forward, loss, evaluate and distil (see compress.Task)."
        )
    return logits


def _two_classes(logits: Tensor) -> Tensor:
    """Return the logits; of a single output z the logits (0, z), whose softmax is its sigmoid."""
    return F.pad(logits, (0, 0, 0, 0, 1, 0)) if logits.shape[1] == 1 else logits


def _weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean; 0 if all weights are 0."""
    return (losses * weights).sum() / weights.sum().clamp_min(TINY)
