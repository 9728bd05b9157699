"""Classification: the default task, with cross entropy, accuracy and distillation of logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.distributed import all_reduce_sum
from compress.errors import BatchError
from compress.formatting import describe_value

from ..distillation_losses import distillation
from ..task import SampleLosses
from .batch_fields import IGNORED, TARGETS, describe_mismatch, split_fields
from .labelled_task import LabelledTask


class SoftBatch(NamedTuple):
    """A batch with soft targets, as `Classification.soften` returns it."""

    input: Tensor
    target: Tensor


class Classification(LabelledTask):
    """Classify images: cross entropy, accuracy, KL divergence of the logits.

    Args:
        train: loader of training batches.
        val: loader of validation batches.
        input: where the input is in a batch: a key, a position or a function. Default: the first item of a tuple, or
            the usual names of a dict.
        target: where the target is, likewise. Targets are class numbers, or rows of probabilities.
    """

    distill_weight = 8.0
    classes: int | None = None

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(self.split(batch)[0])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        target = self.split(batch)[1]
        logits = logits_of(outputs)
        loss = F.cross_entropy(logits, self._check_target(target, logits))
        # The mean over no targets is NaN in torch. Without waiting for the device:
        return loss if target.ndim == 2 else torch.where((target != IGNORED).any(), loss, torch.zeros_like(loss))

    def count_targets(self, batch: Any) -> int:
        """Return the number of targets that are not ignored."""
        target = self.split(batch)[1]
        if target.ndim == 2:
            return len(target) if not isinstance(batch, SoftBatch) or bool(target.any()) else 0
        return int((target != IGNORED).sum())

    def reward(self, outputs: Any, batch: Any) -> Tensor:
        """Return the accuracy on the targets that are not ignored."""
        target, logits = self.split(batch)[1], logits_of(outputs)
        classes = target.argmax(-1) if target.is_floating_point() else target
        counted = classes != IGNORED
        return (logits.argmax(-1) == classes).sum().double() / counted.sum().clamp_min(1)

    @torch.no_grad()
    def sample_losses(self, outputs: Any, batch: Any) -> SampleLosses:
        """Return cross entropy, entropy of the softmax and correctness of each image."""
        target, logits = self.split(batch)[1], logits_of(outputs)
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        entropy = torch.special.entr(log_p.exp()).sum(-1)
        best = logits.argmax(-1)
        if target.ndim == 2:
            return SampleLosses(-(target * log_p).sum(-1), entropy, best == target.argmax(-1), target.any(-1))
        counted = target != IGNORED
        loss = -log_p.gather(-1, target.clamp_min(0)[:, None])[:, 0]
        return SampleLosses(loss, entropy, best == target, counted)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        # Sums of hits, hits among the best five, losses, images. They stay on the device until the end.
        sums: Tensor | None = None
        for batch in batches:
            logits = logits_of(self.forward(model, batch))
            target = self._check_target(self.split(batch)[1], logits)
            loss = F.cross_entropy(logits, target, reduction="sum").double()
            classes = target.argmax(-1) if target.is_floating_point() else target
            best = logits.topk(min(5, logits.shape[-1]), -1).indices
            hits, top5_hits = (best[:, 0] == classes).sum(), (best == classes[:, None]).sum()
            counts = torch.stack([hits.double(), top5_hits.double(), loss, (classes != IGNORED).sum().double()])
            sums = counts if sums is None else sums + counts
            self.classes = logits.shape[-1]
        sums = all_reduce_sum(sums, 4)
        if not sums[3]:
            raise BatchError("val: expected at least one batch with targets; the loader gave none")
        accuracy, top5, mean_loss, _ = (sums / sums[3]).tolist()
        return {"accuracy": accuracy, "loss": mean_loss} | ({"top5": top5} if (self.classes or 0) > 10 else {})

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        return distillation(logits_of(outputs), logits_of(teacher), temperature)

    def draw(self, outputs: Any, batch: Any, temperature: float = 1.0) -> Tensor:
        """Return a random loss whose squared gradient has the curvature of the loss as its mean.

        It is the mean of v z over images, with v = (diag(r) - p r^T) e, p = softmax(z / T), r = sqrt(p), and random
        signs e: v has mean 0 and the covariance diag(p) - p p^T, the second derivative of cross entropy. With a
        temperature it is that of distillation, for any teacher.
        """
        logits, target = logits_of(outputs) / temperature, self.split(batch)[1]
        p = logits.detach().softmax(-1)
        signs = torch.randint_like(p, 2) * 2 - 1
        v = p.sqrt() * signs - p * (p.sqrt() * signs).sum(-1, keepdim=True)
        counted = torch.ones_like(target[:, 0]) if target.ndim == 2 else (target != IGNORED).to(p.dtype)
        return ((v * logits).sum(-1) * counted).sum() / counted.sum().clamp_min(1)

    def soften(self, batch: Any, classes: int, smoothing: float, mix: Any = None) -> SoftBatch:
        """Return the batch with rows of probabilities as targets, without the images whose targets are ignored.

        If all are ignored, the images stay, with rows of zeros: a model need not run on an empty batch.

        Args:
            mix: a timm Mixup, which smooths by itself.

        Raises:
            BatchError: `mix` is given, and the targets are probabilities already.
        """
        x, y = self.split(batch)
        if y.is_floating_point():
            if mix is not None:
                raise BatchError(
                    "mixup, cutmix: the targets of the loader are probabilities already; leave mixup and cutmix out"
                )
            return SoftBatch(x, y * (1 - smoothing) + smoothing / classes)
        counted = y != IGNORED
        if not bool(counted.any()):
            return SoftBatch(x, x.new_zeros(len(x), classes))
        x, y = x[counted], y[counted]
        rows = F.one_hot(y, classes).to(x.dtype) * (1 - smoothing) + smoothing / classes
        even = len(x) - len(x) % 2  # timm mixes even batches; the last image of an odd one is not mixed
        if mix is None or not even:
            return SoftBatch(x, rows)
        mixed, soft = mix(x[:even].clone(), y[:even])
        return SoftBatch(torch.cat([mixed, x[even:]]), torch.cat([soft.to(rows), rows[even:]]))

    def split(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return input and target of a batch.

        Raises:
            BatchError: they are not found, or are not tensors of images and targets.
        """
        if isinstance(batch, SoftBatch):
            return batch
        x, y = split_fields(batch, self._input, self._target, TARGETS, "Classification")
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if y.ndim > 2 or len(x) != len(y) or (y.ndim == 2 and not y.is_floating_point()):
            reason = "targets must be one class number, or one row of probabilities, per image"
            raise describe_mismatch(batch, reason, "Classification", TARGETS[0], y)
        if y.ndim == 2:
            return x, y
        if y.is_floating_point() and not bool((y == y.round()).all()):
            raise BatchError(
                "targets: expected class numbers; got fractions. If the network predicts numbers, give "
                "task=compress.Regression(train, val)"
            )
        return x, y.long()

    def _check_target(self, target: Tensor, logits: Tensor) -> Tensor:
        """Return the target in the form that cross entropy takes.

        Raises:
            BatchError: a target is not one of the model's classes.
        """
        classes = logits.shape[-1]
        if target.ndim == 2:
            if target.shape[1] != classes:
                raise BatchError(f"targets: expected rows of {classes} probabilities, got rows of {target.shape[1]}")
            return target.to(logits.dtype)
        if target.device.type == "cpu":  # on GPUs the kernel checks; looking here would wait for the device
            bad = target[((target < 0) | (target >= classes)) & (target != IGNORED)]
            if len(bad):
                raise BatchError(
                    f"targets: expected classes 0 to {classes - 1}, because the model has {classes} outputs; got "
                    f"{int(bad[0])}. Give the model an output for each class, and number the classes from 0."
                )
        return target


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of a model's output: the output itself, its `logits`, or the first of a tuple.

    Raises:
        BatchError: the output has no logits of shape (images, classes).
    """
    if isinstance(outputs, Mapping) and "logits" in outputs:
        outputs = outputs["logits"]
    logits = getattr(outputs, "logits", outputs)
    if isinstance(logits, (tuple, list)) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        described = f"a tensor of shape {list(logits.shape)}" if isinstance(logits, Tensor) else describe_value(outputs)
        raise BatchError(
            f"the model: expected one row of class scores per image, got {described}. Anything but classification "
            "needs a task: compress.Segmentation, Detection or Regression (task=compress.Segmentation(train, val)), or "
            "your own, with inputs, forward, loss, evaluate and distil (see compress.Task)."
        )
    return logits
