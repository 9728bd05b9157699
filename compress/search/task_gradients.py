"""Gradients of the loss of a search that trains the network's own weights: the task's loss, and distillation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from compress.recipe import LogitDistillation

from .base import Job


def set_task_gradients_(
    job: Job, weights: Sequence[nn.Parameter], batch: Any, distill: LogitDistillation | None
) -> Tensor:
    """Set `grad` of the weights to the gradient of the loss on a batch, or to None if it does not use them.

    Returns the loss.
    """
    task = job.task

    def loss_terms(micro_batch: Any) -> dict[str, Tensor]:
        outputs = task.forward(job.model, micro_batch)
        terms = {"task": task.loss(outputs, micro_batch)}
        if distill is not None:
            distance = task.distil(outputs, job.teacher_outputs(micro_batch), distill.temperature)
            terms["distil"] = distill.weight * distance
        return terms

    result = job.gradient_computer.gradients(loss_terms, batch, weights, counts={"task": task.count_targets})
    for p, g, unused in zip(weights, result.gradients, result.unused, strict=True):
        p.grad = None if unused else g
    return result.loss


def clip_and_step(optimizer: optim.Optimizer, weights: Sequence[nn.Parameter], clip: float | None) -> None:
    """Step the weights on their gradients, clipped to the norm `clip`."""
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(weights, clip)
    optimizer.step()
