"""Parts of a network of cells that only training uses: drop-path and the auxiliary head."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def drop_path(x: Tensor, rate: float) -> Tensor:
    """Set each sample to zero with probability `rate`, and divide the others by 1 - rate (Larsson et al. 2017)."""
    kept = torch.empty(len(x), *[1] * (x.ndim - 1), dtype=x.dtype, device=x.device).bernoulli_(1 - rate)
    return x * kept / (1 - rate)


class AuxiliaryHead(nn.Module):
    """A second classifier at two thirds of the depth: pool, two convolutions, linear (Szegedy et al. 2015)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Conv2d(channels, 128, 1, bias=False),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.Conv2d(128, 768, 2, bias=False),
            nn.BatchNorm2d(768),
            nn.ReLU(),
        )
        self.head = nn.Linear(768, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).flatten(1))
        return out
