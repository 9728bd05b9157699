"""A network that computes something else at every width, with outputs of several types."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class WidthDependent(nn.Module):
    """The sum over channels is divided by how many there are: no width but the dense one computes the same."""

    def __init__(self, ends: str = "floats", bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ends, self.first, self.last = ends, nn.Conv2d(3, 16, 3, bias=bias), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x).relu()
        out = self.last(h * h.shape[1] ** 2)
        if self.ends == "labels":
            return out, out.sum((2, 3)) * 0, out.mean(1).gt(0)
        if self.ends == "complex":
            return torch.complex(out, out.square())
        return {"floats": out, "nothing": out[:0], "integers": out.flatten(1).gt(0).long()}[self.ends]
