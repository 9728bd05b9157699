"""A clock that advances only where a network says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cases import Net

SECONDS_PER_DIMENSION = 20e-6  # seconds for each dimension, on the clock below


class VirtualClock:
    """Time that passes only where a network says so, with noise if wanted."""

    def __init__(self, noise: float = 0.0, seed: int = 0) -> None:
        self.now, self.runs, self.noise, self.seed = 0.0, 0, noise, seed
        self.start()

    def start(self) -> None:
        """Draw noise anew: runs before the first that is timed are none of this clock's business."""
        self.random = np.random.default_rng(self.seed)

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.runs += 1
        self.now += seconds * float(np.exp(self.noise * self.random.standard_normal()))


def timed_network(clock: VirtualClock, widths: tuple[int, int] = (40, 24), idle: float = 0.0) -> nn.Module:
    """A network that takes time in proportion to its widths, and `idle` seconds besides."""

    def forward(self: Any, x: Tensor) -> Tensor:
        clock.passes(idle + SECONDS_PER_DIMENSION * (len(self.first.weight) + len(self.second.weight)))
        return self.last(self.second(self.first(x).relu()).relu())

    torch.manual_seed(0)
    a, b = widths
    return Net(forward, first=nn.Linear(8, a), second=nn.Linear(a, b), last=nn.Linear(b, 4))
