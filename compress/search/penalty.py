"""Penalties gamma * P(alpha) of a fixed strength.

    l1        sum |alpha_i|
    macs      sum c_i |alpha_i|, c_i the multiply-adds that dimension i takes, 1 on average
    latency   sum c_i |alpha_i|, c_i the time that dimension i takes, as measured, 1 on average (Xue 2022, 3.1.4)
    l1_split  by relaxed variable splitting (Xue 2022, 2.1.2): alpha is drawn to v by split / 2 ||alpha - v||^2, and
    l0_split  v = S(alpha, gamma / split) or H(alpha, gamma / split), which is zero where it should be

The first three are stepped on by their sub-gradient, which goes to and fro around zero, or with `proximal` by
soft thresholding after the step on the loss, which reaches it:

    alpha <- optimiser step on dL/dalpha + gamma c sign(alpha)
    alpha <- S(optimiser step on dL/dalpha, eta gamma c),  S(a, t) = sign(a) max(|a| - t, 0)

where eta is the rate at which a steady gradient moves the scores: their learning rate, over 1 - momentum with sgd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

from . import Job

Places = dict[str, list[tuple[nn.Parameter, Tensor]]]  # of a group: where each dimension's scores stand (width, times)


def soft_threshold(value: Tensor, t: float | Tensor) -> Tensor:
    """argmin_v t |v| + (v - value)^2 / 2."""
    return value.sign() * (value.abs() - t).clamp_min(0)


def hard_threshold(value: Tensor, t: float) -> Tensor:
    """argmin_v t [v != 0] + (v - value)^2 / 2."""
    return torch.where(value.abs() <= (2 * t) ** 0.5, torch.zeros_like(value), value)


class Penalty:
    """One of them, with the step on it."""

    def __init__(self, config: Any, alpha: Sequence[nn.Parameter], places: Places, job: Job) -> None:
        self.config, self.alpha, self.places = config, alpha, places
        each = prices(config.penalty, job, [*places]) if places else {}
        self.prices = [torch.zeros_like(a) for a in alpha]  # zero where no score stands
        number = {id(a): i for i, a in enumerate(alpha)}
        for name, here in places.items():
            for a, index in here:
                self.prices[number[id(a)]][index.flatten()] = each[name]
        self.sparse = [a.detach().clone() for a in alpha] if config.penalty.endswith("split") else []

    def state(self) -> dict[str, Tensor]:
        measured = self.prices if self.config.penalty == "latency" else []
        return {f"{n}{i}": v for n, vs in (("sparse", self.sparse), ("price", measured)) for i, v in enumerate(vs)}

    @torch.no_grad()
    def step_(self, optimizer: optim.Optimizer, gradients: Sequence[Tensor], done: int) -> Tensor:
        """A step of the scores on the loss's gradients and on the penalty; returns the penalty."""
        gamma, split, proximal = self.config.gamma, self.config.split, self.config.proximal
        for i, (a, g, price) in enumerate(zip(self.alpha, gradients, self.prices, strict=True)):
            if self.sparse:
                a.grad = g + split * (price > 0) * (a - self.sparse[i])
            else:
                a.grad = g if proximal else g + gamma * price * a.sign()
        optimizer.step()
        if self.sparse:
            threshold = soft_threshold if self.config.penalty == "l1_split" else hard_threshold
            for v, a in zip(self.sparse, self.alpha, strict=True):
                v.copy_(threshold(a, gamma / split))
        elif proximal:
            scores = optimizer.param_groups[0]
            eta = scores["lr"] / (1 - scores.get("momentum", 0.0))
            for a, price in zip(self.alpha, self.prices, strict=True):
                a.copy_(soft_threshold(a, eta * gamma * price))
        return self.value()

    @torch.no_grad()
    def value(self) -> Tensor:
        """gamma * P."""
        values: Sequence[Tensor] = self.sparse or self.alpha
        if self.config.penalty == "l0_split":
            values = [(v != 0).to(v.dtype) for v in values]
        parts = [(price * v.abs()).sum() for price, v in zip(self.prices, values, strict=True)]
        gamma: float = self.config.gamma
        return gamma * torch.stack(parts).sum()

    def importance(self) -> dict[str, Tensor]:
        """|score|, summed over the places of a dimension; zero where the sparse copy is."""
        sparse = {id(a): v for a, v in zip(self.alpha, self.sparse, strict=False)}
        return {
            name: torch.cat([(a.detach().abs() * (sparse.get(id(a), a) != 0))[index] for a, index in here], 1).sum(1)
            for name, here in self.places.items()
        }


def prices(kind: str, job: Job, names: Sequence[str]) -> dict[str, float]:
    """What the penalty of one dimension of each group is multiplied with."""
    if kind not in ("macs", "latency"):
        return dict.fromkeys(names, 1.0)
    cost = job.groups.cost
    if kind == "macs":
        each = cost.prices("macs")
    else:
        if job.times is None:
            raise ValueError("penalty: latency is measured on the network, and nobody said how; use compress.prune")
        times = job.times()
        each = np.array([times[name] for name in cost.names])
    each *= cost.widths.sum() / max(float((each * cost.widths).sum()), float(np.finfo(np.float64).tiny))
    return dict(zip(cost.names, each.tolist(), strict=True))
