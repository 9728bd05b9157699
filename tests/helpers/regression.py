"""The smallest task, and a problem in which some features are known to be useless."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import compress


class RegressionTask(compress.Task):
    """Regression on a fixed target: the smallest task there is."""

    train = val = None

    def inputs(self, batch: Any) -> Any:
        return batch[0]

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return (outputs - batch[1]).square().mean()

    def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:
        return {}

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        return (outputs - teacher).square().mean()


def with_useless_features(norm: bool, seed: int) -> tuple[nn.Module, Any, set[int]]:
    """Twelve fixed features of which three carry noise; the label depends on the other nine alone."""
    torch.manual_seed(seed)
    useless = set(torch.randperm(12)[:3].tolist())
    first = nn.Linear(12, 12, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.eye(12))
    first.weight.requires_grad_(False)
    layers: list[nn.Module] = [first, nn.BatchNorm1d(12) if norm else nn.Identity(), nn.Linear(12, 2)]
    weight = torch.tensor([0.0 if i in useless else 1.0 for i in range(12)])
    x = torch.randn(2048, 12)
    data = [(a, b) for a, b in zip(x.split(128), ((x * weight).sum(1) > 0).long().split(128), strict=True)]
    return nn.Sequential(*layers), data, useless
