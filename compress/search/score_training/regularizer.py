"""Interface of regularizers, which draw scores to zero, and the thresholds that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn, optim

# Group -> (scores, positions) of each parameter that holds scores of the group. Positions have the shape
# (width, scores per dimension) and index the parameter.
ScorePositions = dict[str, list[tuple[nn.Parameter, Tensor]]]
NEWTON_STEPS = 12


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


def transformed_l1(value: Tensor) -> Tensor:
    """Return 2 |v| / (1 + |v|), which counts large values like l0 and small ones like l1."""
    return 2 * value.abs() / (1 + value.abs())


def transformed_l1_threshold(value: Tensor, t: float) -> Tensor:
    """Return argmin_v t transformed_l1(v) + (v - value)^2 / 2.

    Zhang and Xin, Minimization of transformed l1 penalty: closed form representation and iterative thresholding
    algorithms, 2017, with their a = 1.
    """
    size = value.abs()
    threshold = 2 * t if t <= 0.25 else (4 * t) ** 0.5 - 0.5
    angle = torch.arccos((1 - 27 * t / (1 + size) ** 3).clamp(-1, 1))
    shrunk = (2 / 3) * (1 + size) * torch.cos(angle / 3) - 2 / 3 + size / 3
    return torch.where(size <= threshold, torch.zeros_like(value), value.sign() * shrunk)


class SparsePenalty(NamedTuple):
    """A penalty P(v), as a function of each element, and argmin over v of t P(v) + (v - value)^2 / 2."""

    size: Callable[[Tensor], Tensor]
    threshold: Callable[[Tensor, float], Tensor]


SPARSE_PENALTIES = {
    "l1": SparsePenalty(torch.abs, soft_threshold),
    "l0": SparsePenalty(lambda value: (value != 0).to(value.dtype), hard_threshold),
    "tl1": SparsePenalty(transformed_l1, transformed_l1_threshold),
}


def proximal_rates(optimizer: optim.Optimizer, parameters: Sequence[Tensor]) -> list[float | Tensor]:
    """Return the rate at which a steady gradient moves each of the parameters, which a proximal step multiplies.

    lr / (1 - momentum) with SGD. Adam divides its step by the root of the running mean of squared gradients, and so is
    its rate: lr / (sqrt(v) + eps), elementwise; zero for parameters that it has not stepped.
    """
    settings = optimizer.param_groups[0]
    if "betas" not in settings:
        return [settings["lr"] / (1 - settings.get("momentum", 0.0))] * len(parameters)
    rates: list[float | Tensor] = []
    for p in parameters:
        state = optimizer.state.get(p)
        if not state:
            rates.append(0.0)
            continue
        second_moment = state["exp_avg_sq"] / (1 - settings["betas"][1] ** state["step"])
        rates.append(settings["lr"] / (second_moment.sqrt() + settings["eps"]))
    return rates


def group_soft_threshold(
    value: Tensor, t: Tensor, rate: float | Tensor, group_sums: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return argmin_x sum over groups of t ||x|| + sum over elements of (x - value)^2 / (2 rate).

    With one rate, x = value (1 - rate t / ||value||)_+. With a rate for each element, x = value n / (n + rate t), where
    n = ||x|| solves ||value / (n + rate t)|| = 1; n is zero if ||value / rate|| <= t. The reciprocal of the left side
    is nearly linear in n and concave, so Newton's method reaches n from below in a few steps.

    Args:
        t: thresholds of the groups, which broadcast over `value`.
        group_sums: returns the sum over each group, which broadcasts over `value`.
    """
    tiny = torch.finfo(value.dtype).tiny
    if not isinstance(rate, Tensor):
        norm = group_sums(value.square()).sqrt()
        return value * (1 - rate * t / norm.clamp_min(tiny)).clamp_min(0)
    shift = rate * t
    # A lower bound, from ||value|| <= n + max(rate t).
    norm = (group_sums(value.square()).sqrt() - group_sums(shift.square()).sqrt()).clamp_min(0)
    for _ in range(NEWTON_STEPS):
        squares = (value / (norm + shift).clamp_min(tiny)).square()
        total = group_sums(squares)
        slope = group_sums(squares / (norm + shift).clamp_min(tiny)) / total.clamp_min(tiny)
        norm = (norm + (total.sqrt() - 1) / slope.clamp_min(tiny)).clamp_min(0)
    return value * (norm / (norm + shift).clamp_min(tiny))
