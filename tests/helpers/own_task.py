"""A task written from the protocol alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RegressionFromProtocol:
    """A task of one's own, from the protocol alone."""

    def __init__(self) -> None:
        self.train = [torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        self.val = self.train[:1]
        self.distilled = 0

    def inputs(self, batch: Tensor) -> Any:
        return batch

    def forward(self, model: nn.Module, batch: Tensor) -> Any:
        return {"out": model(batch)}

    def loss(self, outputs: Any, batch: Tensor) -> Tensor:
        return outputs["out"].square().mean()

    def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:
        assert not model.training
        return {"quality": -float(sum(self.loss(self.forward(model, b), b) for b in batches))}

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        self.distilled += 1
        assert not teacher["out"].requires_grad
        return (outputs["out"] - teacher["out"]).square().mean()
