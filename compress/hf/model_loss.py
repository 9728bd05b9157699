"""ModelLoss: train a Hugging Face model by the loss that it returns itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.distributed import all_reduce_sum
from compress.errors import BatchError
from compress.formatting import describe_value
from compress.training import Task

from .model_call import ModelCall

NO_PREDICTIONS = ("loss", "hidden_state", "attention", "feature")  # in names of outputs that distillation leaves out


class ModelLoss(Task):
    """The task of a Hugging Face model that returns a loss: batches are dicts of its arguments, labels among them.

    The metric is the negative loss, because larger is better. The teacher's predictions are matched by their relative
    squared error. Keys of a batch that are not arguments of the model are left out.

    Args:
        model: the model, or one of the same class.
        train: loader of training batches.
        val: loader of validation batches.
    """

    sums_over_processes = True
    distill_weight: float | None = 1.0

    def __init__(
        self, model: PreTrainedModel, train: Iterable[Any] | None = None, val: Iterable[Any] | None = None
    ) -> None:
        self.train, self.val = train, val
        self._call = ModelCall(model)

    def inputs(self, batch: Any) -> dict[str, Any]:
        """Return the arguments of the model without labels."""
        return self._call.inputs(batch)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(**self._call.arguments(batch))

    def teach(self, model: nn.Module, batch: Any) -> Any:
        return model(**self._call.inputs(batch))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return self._call.loss(outputs, batch)

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        """Return the mean over the predictions of ||s - t||^2 / ||t||^2."""
        pairs = [
            (outputs[name].float(), target.float())
            for name, target in teacher.items()
            if isinstance(target, Tensor) and target.is_floating_point() and name in outputs
            if not any(word in name for word in NO_PREDICTIONS)
        ]
        if not pairs:
            raise BatchError(
                f"distill: expected predictions to compare; the outputs are {describe_value(teacher)}. "
                "Leave distill out"
            )
        return torch.stack([(s - t).square().sum() / t.square().sum().clamp_min(1e-12) for s, t in pairs]).mean()

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        losses = LossSum()
        for batch in batches:
            losses.add(self.loss(self.forward(model, batch), batch), self.count_targets(batch))
        return {"minus_loss": -losses.mean()}


class LossSum:
    """A sum of losses, weighted by the samples that each is the mean over; it stays on the device until it is read."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None  # of losses and of samples

    def add(self, loss: Tensor, count: float | None) -> None:
        """Add the loss of a batch of `count` samples; None: unknown, so that each batch counts once."""
        weight = 1.0 if count is None else count
        term = torch.stack([loss.double().reshape(()) * weight, loss.new_tensor(weight, dtype=torch.double)])
        self._sums = term if self._sums is None else self._sums + term

    def mean(self) -> float:
        """Return the mean over the samples of all processes.

        Raises:
            BatchError: there are none.
        """
        total, count = all_reduce_sum(self._sums, 2).tolist()
        if not count:
            raise BatchError("val: expected at least one batch; the loader gave none")
        return float(total / count)
