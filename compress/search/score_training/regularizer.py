"""Interface of regularizers, which draw scores to zero, and the thresholds that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn, optim

# Group -> (scores, positions) of each parameter that holds scores of the group. Positions have the shape
# (width, scores per dimension) and index the parameter.
ScorePositions = dict[str, list[tuple[nn.Parameter, Tensor]]]


class ScoreRegularizer(ABC):
    """Term that draws scores to zero, and the importance that follows from the scores."""

    @abstractmethod
    def step_(self, optimizer: optim.Optimizer, gradients: Sequence[Tensor], done: int) -> Tensor:
        """Step the scores on the gradients of the loss and on the regularizer; return its value.

        Args:
            done: steps made, this one included.
        """

    @abstractmethod
    def importance(self) -> dict[str, Tensor]:
        """Return the importance of every dimension of every group."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a resumed search needs."""


def soft_threshold(value: Tensor, t: float | Tensor) -> Tensor:
    """Return argmin_v t |v| + (v - value)^2 / 2."""
    return value.sign() * (value.abs() - t).clamp_min(0)


def hard_threshold(value: Tensor, t: float) -> Tensor:
    """Return argmin_v t [v != 0] + (v - value)^2 / 2."""
    return torch.where(value.abs() <= (2 * t) ** 0.5, torch.zeros_like(value), value)


def effective_lr(optimizer: optim.Optimizer) -> float:
    """Return the rate at which a steady gradient moves the parameters: lr, over 1 - momentum with SGD."""
    settings = optimizer.param_groups[0]
    rate: float = settings["lr"] / (1 - settings.get("momentum", 0.0))
    return rate
