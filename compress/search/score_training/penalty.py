"""Penalties gamma * P(alpha) of a fixed strength.

    l1        sum |alpha_i|
    macs      sum c_i |alpha_i|, c_i the multiply-adds that dimension i takes, 1 on average
    latency   sum c_i |alpha_i|, c_i the time that dimension i takes, as measured, 1 on average (3.1.4 of Xue 2022 has
              sum c_k softmax(alpha)_k instead, for operations of which one is chosen)
    l1_split  by relaxed variable splitting (Xue 2022, 2.1.2): alpha is drawn to v by split / 2 ||alpha - v||^2, and
    l0_split  v = argmin gamma / split P(v) + ||alpha - v||^2 / 2, which is exactly zero for small scores
    tl1_split P(v) = sum |v_i|, sum [v_i != 0], or transformed l1, sum 2 |v_i| / (1 + |v_i|)

The first three are minimized by sub-gradient steps, which oscillate around zero, or with `proximal` by soft
thresholding after the step on the loss, which reaches zero:

    alpha <- optimizer step on dL/dalpha + gamma c sign(alpha)
    alpha <- S(optimizer step on dL/dalpha, eta gamma c),  S(a, t) = sign(a) max(|a| - t, 0)

where eta is the rate at which a steady gradient moves the scores: their learning rate, over 1 - momentum with SGD, and
over the root of the mean squared gradient with Adam, so that the minimum is the same with every optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

from compress.budget import UNITS

from ..base import Job
from .regularizer import (
    SPARSE_PENALTIES,
    ScorePositions,
    ScoreRegularizer,
    proximal_rates,
    soft_threshold,
)


class Penalty(ScoreRegularizer):
    """One of the penalties above, on the scores of all groups."""

    def __init__(self, config: Any, alpha: Sequence[nn.Parameter], score_positions: ScorePositions, job: Job) -> None:
        self.config, self.alpha, self.score_positions = config, alpha, score_positions
        group_costs = relative_costs(config.penalty, job, [*score_positions]) if score_positions else {}
        self.costs = [torch.zeros_like(a) for a in alpha]  # c_i; zero at positions without a score
        index_of = {id(a): i for i, a in enumerate(alpha)}
        for name, positions in score_positions.items():
            for a, index in positions:
                self.costs[index_of[id(a)]][index.flatten()] = group_costs[name]
        self.sparse_copies = [a.detach().clone() for a in alpha] if config.penalty.endswith("split") else []  # v

    def state(self) -> dict[str, Tensor]:
        measured = self.costs if self.config.penalty == "latency" else []
        tables = {"sparse": self.sparse_copies, "cost": measured}
        return {f"{key}{i}": tensor for key, tensors in tables.items() for i, tensor in enumerate(tensors)}

    @torch.no_grad()
    def step_(self, optimizer: optim.Optimizer, gradients: Sequence[Tensor], done: int) -> Tensor:
        gamma, split, proximal = self.config.gamma, self.config.split, self.config.proximal
        for i, (a, g, cost) in enumerate(zip(self.alpha, gradients, self.costs, strict=True)):
            if self.sparse_copies:
                a.grad = g + split * (cost > 0) * (a - self.sparse_copies[i])
            else:
                a.grad = g if proximal else g + gamma * cost * a.sign()
        optimizer.step()
        if self.sparse_copies:
            threshold = SPARSE_PENALTIES[self.config.penalty.removesuffix("_split")].threshold
            for v, a in zip(self.sparse_copies, self.alpha, strict=True):
                v.copy_(threshold(a, gamma / split))
        elif proximal:
            for a, cost, eta in zip(self.alpha, self.costs, proximal_rates(optimizer, self.alpha), strict=True):
                a.copy_(soft_threshold(a, eta * gamma * cost))
        return self.value()

    @torch.no_grad()
    def value(self) -> Tensor:
        """Return gamma * P."""
        size = SPARSE_PENALTIES[self.config.penalty.removesuffix("_split")].size if self.sparse_copies else torch.abs
        values: Sequence[Tensor] = self.sparse_copies or self.alpha
        sums = [(cost * size(v)).sum() for cost, v in zip(self.costs, values, strict=True)]
        gamma: float = self.config.gamma
        return gamma * torch.stack(sums).sum()

    def importance(self) -> dict[str, Tensor]:
        """Return |score|, summed over the scores of a dimension; zero where the sparse copy is zero."""
        sparse = {id(a): v for a, v in zip(self.alpha, self.sparse_copies, strict=False)}

        def magnitudes(a: nn.Parameter) -> Tensor:
            return a.detach().abs() * (sparse.get(id(a), a) != 0)

        return {
            name: torch.cat([magnitudes(a)[index] for a, index in positions], 1).sum(1)
            for name, positions in self.score_positions.items()
        }


def relative_costs(penalty: str, job: Job, names: Sequence[str]) -> dict[str, float]:
    """Return c_i, the cost of one dimension of each group, 1 on average over dimensions.

    Raises:
        ValueError: the penalty is latency, which cannot be measured here.
    """
    if penalty not in ("macs", "latency"):
        return dict.fromkeys(names, 1.0)
    cost = job.groups.cost
    if penalty == "macs":
        costs = UNITS["macs"].cost_per_dimension(job.groups)
    else:
        if job.dimension_times is None:
            raise ValueError("penalty: latency cannot be measured in this search; use compress.prune")
        times = job.dimension_times()
        costs = np.array([times[name] for name in cost.names])
    costs *= cost.widths.sum() / max(float((costs * cost.widths).sum()), float(np.finfo(np.float64).tiny))
    return dict(zip(cost.names, costs.tolist(), strict=True))
