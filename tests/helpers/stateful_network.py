"""A network whose outputs depend on extra state and on a buffer that is not persistent, which training changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from helpers.digits import dense


class Counting(nn.Module):
    """Scales by what it has seen in training: a number, a tensor in a dict, and a buffer."""

    trend: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.seen = 0, {"mean": torch.zeros(())}
        self.register_buffer("trend", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.seen = {"mean": 0.9 * self.seen["mean"] + 0.1 * x.detach().mean()}
            self.trend.mul_(0.9).add_(x.detach().std(), alpha=0.1)
        return x * (1 + 0.01 * self.steps + self.seen["mean"] + self.trend)

    def get_extra_state(self) -> Any:
        return {"steps": self.steps, "seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.steps, self.seen = state["steps"], state["seen"]


class Stateful(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(dense(), Counting())
