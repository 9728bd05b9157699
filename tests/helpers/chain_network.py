"""A short chain of convolutions and images for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cases import randomise_
from cases.networks_plain import cbr, head


def chain(seed: int = 0) -> nn.Sequential:
    return randomise_(nn.Sequential(cbr(3, 6), cbr(6, 7), head(7)).double(), seed)  # type: ignore[return-value]


def images(batch: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(5)).to(dtype)
