"""Loss and metrics of several networks on the same few batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compress.data import batch_size_of, derive_seed, reproducible_reading, seed_loader
from compress.distributed import all_reduce_sum, broadcast_object
from compress.modules import module_mode
from compress.storage import isolated_random_state
from compress.training import Classification, Engine, Task, check_metrics


@dataclass(frozen=True)
class Measurement:
    """Loss and metrics of a network."""

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


class FixedBatches:
    """A few batches that are read once, on which networks are measured in eval mode.

    Several processes hold a part each, and get the same numbers.
    """

    def __init__(self, batches: Sequence[Any], task: Task, engine: Engine) -> None:
        self.batches, self.task, self.engine = batches, task, engine

    @torch.no_grad()
    def measure(self, model: nn.Module) -> Measurement:
        """Return the loss and the task's metrics; no metrics if the task evaluates on data of its own only.

        Raises:
            TypeError: `task.evaluate` does not return a dict of numbers by name.
        """
        task, metrics = self.task, dict[str, float]()
        with module_mode(model, training=False), isolated_random_state(self.engine.seed):
            if task.can_test:
                metrics = broadcast_object(check_metrics(task.evaluate(model, self._moved()), task))
            if isinstance(task, Classification) and "loss" in metrics:
                loss = metrics.pop("loss")  # the mean cross entropy: no second pass
            else:
                loss = self._mean_loss(model)
        return Measurement(loss, metrics)

    def _moved(self) -> Iterator[Any]:
        return map(self.engine.move, self.batches)

    def _mean_loss(self, model: nn.Module) -> float:
        """Return the mean of the task's loss over the targets of all batches."""
        sums: Tensor | None = None
        for batch in self._moved():
            loss = self.task.loss(self.task.forward(model, batch), batch).detach().double()
            count = self.task.count_targets(batch)
            weight = torch.full_like(loss, 1.0 if count is None else count)
            term = torch.stack([loss * weight, weight])
            sums = term if sums is None else sums + term
        sums = all_reduce_sum(sums, 2)
        return float(sums[0] / sums[1])


def read_batches(loader: Iterable[Any], seed: int, count: int, images: int) -> tuple[list[Any], list[Any]]:
    """Return the first batches of a loader, and those behind them until they hold so many images."""
    first: list[Any] = []
    others: list[Any] = []
    with reproducible_reading(loader):
        seed_loader(loader, derive_seed(seed, "measurement"), 0)
        for batch in loader:
            if len(first) < count:
                first.append(batch)
            elif images > 0:
                others.append(batch)
                images -= batch_size_of(batch) or 1
            if len(first) == count and images <= 0:
                break
    return first, others
