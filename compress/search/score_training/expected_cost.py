"""Scores of operations: steps on their gradients and on the expected cost of the mixture.

    P(alpha) = sum over choices of sum_k softmax(alpha)_k c_k          (Xue 2022, 2.38 and 3.1.4)
    dP/dalpha_k = softmax(alpha)_k (c_k - sum_l softmax(alpha)_l c_l)

where c_k is the cost of a candidate in all places that share its scores: with `penalty: latency` its time in
milliseconds, as measured, with `penalty: macs` its share of the multiply-adds of the costliest network. Without a
number as gamma, and with other penalties, there is no such term. The importance is softmax(alpha).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from compress.budget import Operations
from compress.distributed import broadcast_object

from .regularizer import ScoreRegularizer


class ExpectedCost(ScoreRegularizer):
    """gamma times the expected cost of the mixture."""

    def __init__(self, config: Any, scores: Mapping[str, nn.Parameter], operations: Operations) -> None:
        self.scores = scores
        is_number = config.gamma != "auto" and config.penalty in ("macs", "latency")
        self.gamma = float(config.gamma) if is_number else 0.0
        self.costs = {name: torch.zeros_like(a, requires_grad=False) for name, a in scores.items()}
        self.measured = bool(self.gamma) and config.penalty == "latency"
        if self.gamma:
            costs = broadcast_object(operations.costs(config.penalty))
            unit = 1.0
            if config.penalty == "macs":
                unit = sum(max(table.values()) for table in costs.values()) or 1.0
            for name, cost in self.costs.items():
                cost.copy_(torch.tensor([c / unit for c in costs[name].values()]))

    def state(self) -> dict[str, Tensor]:
        return {f"time{i}": cost for i, cost in enumerate(self.costs.values())} if self.measured else {}

    @torch.no_grad()
    def step_(self, optimizer: optim.Optimizer, gradients: Sequence[Tensor], done: int) -> Tensor:
        for (name, a), g in zip(self.scores.items(), gradients, strict=True):
            p, cost = torch.softmax(a, 0), self.costs[name]
            a.grad = g + self.gamma * p * (cost - (p * cost).sum()) if self.gamma else g
        optimizer.step()
        return self.value()

    @torch.no_grad()
    def value(self) -> Tensor:
        """Return gamma * P."""
        terms = [(torch.softmax(a, 0) * self.costs[name]).sum() for name, a in self.scores.items()]
        return self.gamma * torch.stack(terms).sum()

    def importance(self) -> dict[str, Tensor]:
        return {name: torch.softmax(a.detach(), 0) for name, a in self.scores.items()}
