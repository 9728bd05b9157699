"""Regression: numbers instead of classes, with squared, absolute or Huber loss and the coefficient of determination."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.distributed import all_gather_object, all_reduce_sum
from compress.errors import BatchError
from compress.formatting import describe_value

from .batch_fields import TARGETS, Pick, describe_mismatch, single_sample, split_fields
from .labelled_task import LabelledTask

RegressionLoss = Literal["mse", "l1", "huber"]
ROUNDING = 1e-12  # relative size below which a variance is that of a constant


class Regression(LabelledTask):
    """Predict numbers: squared, absolute or Huber loss, R² and mean absolute error, and the same loss to the teacher.

    The loss is the mean over all numbers of the targets. R² is that of scikit-learn: the mean over outputs, which lie
    along dimension 1, of 1 - sum (y - f)² / sum (y - mean y)².

    Args:
        train: loader of training batches.
        val: loader of validation batches.
        input: where the input is in a batch: a key, a position or a function. Default: the first item of a tuple, or
            the usual names of a dict.
        target: where the target is, likewise: a tensor of the shape of the model's output; a dimension of size 1 may be
            left out.
        loss: mse, l1 or huber.
        delta: error above which the Huber loss is linear.

    Raises:
        ValueError: the loss has another name, or delta is not positive.
    """

    distill_weight = 1.0

    def __init__(
        self,
        train: Iterable[Any] | None = None,
        val: Iterable[Any] | None = None,
        *,
        input: Pick | None = None,
        target: Pick | None = None,
        loss: RegressionLoss = "mse",
        delta: float = 1.0,
    ) -> None:
        if loss not in get_args(RegressionLoss) or not delta > 0:
            raise ValueError(
                f"Regression: expected loss={' or '.join(map(repr, get_args(RegressionLoss)))} and delta above 0; got "
                f"loss={loss!r}, delta={delta}"
            )
        super().__init__(train, val, input=input, target=target)
        self._loss, self._delta = loss, delta

    def describe(self) -> dict[str, Any]:
        return {"loss": self._loss, "delta": self._delta}

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(self.inputs(batch))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return self._distance(*self._pair(outputs, batch))

    def count_targets(self, batch: Any) -> float:
        """Return how many numbers the targets are."""
        return float(self.split(batch)[1].numel())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Return R², the mean absolute error and the loss."""
        # By output: count, y, y², squared errors, absolute errors, losses. On the device until the end.
        sums: Tensor | None = None
        for batch in batches:
            predicted, target = self._pair(self.forward(model, batch), batch)
            f, y = (_rows(value).double() for value in (predicted, target))
            loss = self._distance(f, y) * torch.ones_like(y)
            parts = [torch.ones_like(y), y, y.square(), (y - f).square(), (y - f).abs(), loss]
            counts = torch.stack([part.sum(0) for part in parts])
            sums = counts if sums is None else sums + counts
        width = max(all_gather_object(0 if sums is None else sums.shape[1]))
        total = all_reduce_sum(None if sums is None else sums.flatten(), 6 * width).view(6, width).cpu()
        if not width or not total[0].all():
            raise BatchError("val: expected at least one batch with targets; the loader gave none")
        count, y, y2, squared, absolute, loss = total
        variation = y2 - y.square() / count
        variation = torch.where(variation > ROUNDING * y2, variation, 0.0)
        exact = torch.where(squared > 0, 0.0, 1.0)  # of constant targets, as scikit-learn has it
        r2 = torch.where(variation > 0, 1 - squared / variation.clamp_min(1e-300), exact).mean()
        return {"r2": float(r2), "mae": float(absolute.sum() / count.sum()), "loss": float(loss.sum() / count.sum())}

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        """Return the loss with the teacher's outputs in place of targets."""
        student, taught = predictions(outputs), predictions(teacher)
        if student.shape != taught.shape:
            raise ValueError(
                f"distillation: expected outputs of the same shape; got {describe_value(student)} of the student and "
                f"{describe_value(taught)} of the teacher"
            )
        return self._distance(student, taught)

    def split(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return input and target of a batch.

        Raises:
            BatchError: they are not found, or are not tensors of the same number of samples.
        """
        if isinstance(batch, (tuple, list)) and len(batch) > 1 and isinstance(batch[1], float):
            raise single_sample(batch)
        x, y = split_fields(batch, self._input, self._target, TARGETS, "Regression")
        if len(x) != len(y):
            raise describe_mismatch(batch, "there must be a target for each sample", "Regression", TARGETS[0])
        return x, y

    def _pair(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Return predictions and targets of the same shape: broadcasting (n,) and (n, 1) would compare all with all.

        Raises:
            BatchError: the shapes differ in more than dimensions of size 1.
        """
        predicted, target = predictions(outputs), self.split(batch)[1]
        sizes = [[n for n in value.shape if n != 1] for value in (predicted, target)]
        if sizes[0] != sizes[1]:
            raise BatchError(
                f"targets: expected the shape of the model's output, {list(predicted.shape)}; got {list(target.shape)}"
            )
        return predicted, target.reshape(predicted.shape).to(predicted.dtype)

    def _distance(self, predicted: Tensor, target: Tensor) -> Tensor:
        if self._loss == "mse":
            return F.mse_loss(predicted, target)
        if self._loss == "l1":
            return F.l1_loss(predicted, target)
        return F.huber_loss(predicted, target, delta=self._delta)


def predictions(outputs: Any) -> Tensor:
    """Return the numbers in a model's output: the output itself, its `logits`, or the first of a tuple.

    They are in single precision at least: a target in half precision would lose digits.

    Raises:
        BatchError: the output has none.
    """
    values = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if isinstance(values, (tuple, list)) and values:
        values = values[0]
    if not isinstance(values, Tensor):
        raise BatchError(
            f"the model: expected a tensor of predictions, got {describe_value(outputs)}. Other outputs need your own "
            "task: with inputs, forward, loss, evaluate and distil (see compress.Task)."
        )
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _rows(values: Tensor) -> Tensor:
    """Return numbers as rows, with the outputs (dimension 1) as columns."""
    return values[:, None] if values.ndim == 1 else values.movedim(1, -1).reshape(-1, values.shape[1])
