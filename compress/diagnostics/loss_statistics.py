"""Loss and variance of its gradient, estimated from batches.

With n samples of losses f_i, in batches j of B_j samples with mean gradient G_j (j = 1 .. m):

    s = mean_i f_i
    g = mean_i ||grad f_i - mean grad||^2  ~  sum_j B_j ||G_j - G||^2 / (m - 1),   G = sum_j B_j G_j / sum_j B_j

The estimate has the mean of the unbiased variance of single samples, for batches of any sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.data import batch_size_of
from compress.errors import BatchError
from compress.training import Engine, Task


class LossStatistics:
    """Mean loss and gradient variance of networks on fixed batches, without waiting for the device.

    Args:
        batches: on the device of the engine; they stay in memory.

    Raises:
        BatchError: no batch has targets.
    """

    def __init__(self, task: Task, engine: Engine, batches: Sequence[Any]) -> None:
        self.task, self.engine = task, engine
        sized = [(batch, self._count(batch)) for batch in batches]
        if not sized:
            raise BatchError("landscape: expected at least one batch; the loader gave none")
        known = all(count is not None for _, count in sized)
        # Where the numbers of targets are unknown, all batches weigh the same, and g is the variance of a batch.
        self.batches = [(batch, float(count or 0) if known else 1.0) for batch, count in sized if count != 0]
        if not self.batches:
            raise BatchError("landscape: expected batches with targets; all targets are ignored")
        self.samples = sum(size for _, size in self.batches)

    @torch.no_grad()
    def mean_loss(self, model: nn.Module) -> Tensor:
        """Return s at the weights of a network."""
        computer = self.engine.gradient_computer
        total = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        for batch, size in self.batches:
            moved = self.engine.move(batch)  # a container of its own: a task may take things out of it

            losses = computer.run_micro_batches(lambda part: self._loss(model, part).detach().double(), moved)
            if len(losses) > 1:
                counts = [float(self._count(part) or 0) for part in computer.micro_batches(moved)]
                shares = [count / sum(counts) for count in counts] if sum(counts) else [1 / len(counts)] * len(counts)
                losses = [loss * share for loss, share in zip(losses, shares, strict=True) if share]
            total += torch.stack(losses).sum() * (size / self.samples)
        return total

    def gradient_variance(self, model: nn.Module, parameters: Sequence[Tensor]) -> Tensor:
        """Return g at the weights of a network, from a running mean of the gradients (Welford 1962)."""
        means = [torch.zeros_like(p) for p in parameters]
        deviation = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        seen = 0.0
        for batch, size in self.batches:
            gradients = self.engine.gradient_computer.gradients(
                lambda part: {"loss": self._loss(model, part)},
                self.engine.move(batch),
                parameters,
                counts={"loss": self._count},
            ).gradients
            seen += size
            distances = torch._foreach_sub(gradients, means)
            torch._foreach_add_(means, distances, alpha=size / seen)
            norms = torch.stack(torch._foreach_norm(distances)).double()
            deviation += size * (1 - size / seen) * norms.square().sum()
        return deviation / (len(self.batches) - 1)

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.task.loss(self.task.forward(model, batch), batch).reshape(())

    def _count(self, batch: Any) -> float | None:
        """Return the number of targets that the loss of a batch is the mean over; None if unknown."""
        count = self.task.count_targets(batch)
        return batch_size_of(batch) if count is None else count
