"""Example 2.4 of the thesis (Xue 2022), whose equilibria are known in closed form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compress.search.base import Job
from compress.search.score_training.regularizer import ScorePositions
from compress.search.score_training.scored_search import ScoredSearch
from helpers.regression import RegressionTask


class Solvable(nn.Module):
    """The weight and the score of example 2.4."""

    def __init__(self, w: float, a: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w], dtype=torch.float64))
        self.a = nn.Parameter(torch.tensor([a], dtype=torch.float64))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.w, self.a


class Example(RegressionTask):
    """L_p = a w - 2 a + 1 and L_a = w^2 - 2 a w + a^2."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model()

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        w, a = outputs
        return (a * w - 2 * a + 1 if batch == "p" else w**2 - 2 * a * w + a**2).sum()


def on_example(
    cls: type[ScoredSearch], steps: int = 4000, start: tuple[float, float] = (0.3, 0.2), **settings: Any
) -> Any:
    class Here(cls):  # type: ignore[misc, valid-type]
        def attach_scores(self) -> ScorePositions:
            return {"a": [(self.job.model.a, torch.zeros(1, 1, dtype=torch.long))]}

    model = Solvable(*start)
    common = {
        "epochs": f"{steps} steps",
        "lr": 0.05,
        "momentum": 0,
        "weight_decay": 0,
        "schedule": "constant",
        "gamma": 0,
    }
    config = cls.Config.model_validate({"method": cls.Config.model_fields["method"].default, **common, **settings})
    search = Here(config, Job(model, None, Example(), steps))  # type: ignore[arg-type]
    for _ in range(steps):
        search.step(("p", "a"))
    return search
