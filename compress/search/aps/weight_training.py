"""Passes of the search: gradients of the weights, and the reward of the current widths without training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

from compress.distributed import all_reduce_sum, world_size
from compress.recipe import LogitDistillation
from compress.training import GradientResult

from ..base import Job
from ..score_training.recompute import recompute_gated_weights


class WeightTraining:
    """Train the weights of a job's model at the widths that its gates have."""

    def __init__(self, job: Job, weights: Sequence[nn.Parameter], distill: LogitDistillation | None) -> None:
        self.job, self.weights, self.distill = job, weights, distill

    def gradients(self, batch: Any, tensors: Sequence[Tensor]) -> GradientResult:
        """Return the terms of the loss on a batch and their gradients."""
        counts = {"task": self.job.task.count_targets}
        return self.job.gradient_computer.gradients(self._loss_terms, batch, tensors, counts=counts)

    def step(self, batch: Any, optimizer: optim.Optimizer, clip: float | None) -> dict[str, Tensor]:
        """Step the weights on a batch; return the terms of the loss. Weights that it does not use are not decayed."""
        result = self.gradients(batch, self.weights)
        for p, g, unused in zip(self.weights, result.gradients, result.unused, strict=True):
            p.grad = None if unused else g
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self.weights, clip)
        optimizer.step()
        return {"loss": result.loss, **result.terms}

    def _loss_terms(self, batch: Any) -> dict[str, Tensor]:
        task, model = self.job.task, self.job.model
        with recompute_gated_weights(model):
            outputs = task.forward(model, batch)
        terms = {"task": task.loss(outputs, batch)}
        if self.distill is not None:
            distance = task.distil(outputs, self.job.teacher_outputs(batch), self.distill.temperature)
            terms["distil"] = self.distill.weight * distance
        return terms

    @torch.no_grad()
    def task_reward(self, batch: Any) -> tuple[Tensor, float]:
        """Return the sum of the task's reward over a batch of this process, and what it counts."""
        job, task = self.job, self.job.task
        with frozen_statistics(job.model):
            rewards = job.gradient_computer.run_micro_batches(
                lambda part: task.reward(task.forward(job.model, part), part).double(), batch
            )
        if len(rewards) == 1 and world_size() == 1:
            return rewards[0], 1.0
        counts = [task.count_targets(part) for part in job.gradient_computer.micro_batches(batch)]
        weights = [1.0 if count is None else float(count) for count in counts]
        counted = [r * w for r, w in zip(rewards, weights, strict=True) if w]  # the mean over nothing may be NaN
        return torch.stack([*counted, torch.zeros_like(rewards[0])]).sum(), sum(weights)


def mean_over_processes(sums: Sequence[Tensor], counts: Sequence[float]) -> Tensor:
    """Return the means of rewards over all processes."""
    total = torch.stack([*sums, *(torch.full_like(sums[0], count) for count in counts)])
    total = all_reduce_sum(total, len(total)).to(total.device)
    return total[: len(sums)] / total[len(sums) :].clamp_min(1e-12)


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Run forward passes that leave the model as it is: batch norms use the batch's statistics, dropout is off.

    The running statistics of batch norms are a mean over many widths and fit none.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    tracking = [norm.track_running_stats for norm in norms]
    dropouts = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
    try:
        for norm in norms:
            norm.track_running_stats = False
        for dropout in dropouts:
            dropout.training = False
        yield
    finally:
        for norm, value in zip(norms, tracking, strict=True):
            norm.track_running_stats = value
        for dropout in dropouts:
            dropout.training = True
