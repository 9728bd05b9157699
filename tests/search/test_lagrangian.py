"""Theorem 2.2 of the thesis (Xue 2022) on a small network: below its step sizes the Lagrangian never rises."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from compress.search.base import Job
from compress.search.rarts import Rarts
from helpers.bilevel import loss_at
from helpers.regression import RegressionTask


class Smooth(RegressionTask):
    """A regression, and what its loss is as a function of all parameters at once."""

    def curvature(self, search: Rarts, weights: list[Tensor], batch: Any) -> float:
        """The spectral norm of the Hessian in weights and scores."""
        sizes = [p.numel() for p in (*weights, *search.alpha)]
        shapes = [p.shape for p in (*weights, *search.alpha)]

        def loss(flat: Tensor) -> Tensor:
            parts = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
            return loss_at(search, parts[: len(weights)], parts[len(weights) :], batch)

        flat = torch.cat([p.detach().flatten() for p in (*weights, *search.alpha)])
        hessian = torch.autograd.functional.hessian(loss, flat)
        return float(torch.linalg.matrix_norm(hessian, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lagrangian_of_a_network_never_rises_below_the_step_sizes_of_theorem_2_2(seed: int) -> None:
    """The curvature is measured along the way, so that the theorem's condition is known to hold."""
    lam, beta, lipschitz, task = 2.0, 3.0, 30.0, Smooth()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    data = tuple((torch.randn(8, 3).double(), torch.randn(8, 2).double()) for _ in range(2))
    groups = compress.find_groups(model, data[0][0])

    def path(faster: float) -> tuple[list[float], float]:
        rates = {
            "lr": faster * 0.99 * 0.5 / (beta / 2 + lam * lipschitz),
            "u": {"lr": faster * 0.99 * 0.5 / (beta / 2 + lipschitz)},
            "alpha": {"lr": faster * 0.99 * 0.5 / ((1 + lam) * lipschitz)},
        }
        plain = {"momentum": 0, "weight_decay": 0, "schedule": "constant", "gamma": 0, "lambda": lam, "beta": beta}
        config = Rarts.Config.model_validate({"method": "rarts", "epochs": 1, "start": "apart", **plain, **rates})
        search = Rarts(config, Job(copy.deepcopy(model), groups, task, 200))
        values, steepest = [], 0.0
        for step in range(200):
            primary, auxiliary = (
                float(loss_at(search, list(w), search.alpha, batch).detach())
                for w, batch in ((search.u, data[0]), (search.weights, data[1]))
            )
            apart = sum(float((u - w).detach().square().sum()) for u, w in zip(search.u, search.weights, strict=True))
            values.append(primary + lam * auxiliary + beta / 2 * apart)
            if step % 20 == 0 and faster == 1:
                steepest = max(steepest, task.curvature(search, list(search.weights), data[1]))
                steepest = max(steepest, task.curvature(search, list(search.u), data[0]))
            search.step(data)
        return values, steepest

    values, steepest = path(1.0)
    assert steepest < lipschitz, "the condition of the theorem"
    assert all(b <= a + 1e-12 for a, b in pairwise(values))
    assert values[-1] < 0.9 * values[0]
    wild, _ = path(60.0)
    assert not all(b <= a + 1e-12 for a, b in pairwise(wild)), "far above these step sizes it does rise"
