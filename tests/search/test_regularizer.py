"""Proximal steps: thresholds that are minima, and rates under Adam."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from compress.search.base import search_class
from compress.search.score_training.penalty import Penalty
from compress.search.score_training.regularizer import group_soft_threshold, proximal_rates, soft_threshold


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_proximal_steps_of_adam_converge_to_the_same_minimum(optimizer: Any) -> None:
    """min h (a - c)^2 / 2 + gamma |a| has the solution S(c, gamma / h), whatever Adam divides the gradients by."""
    config = search_class("netslim").Config.model_validate(
        {"method": "netslim", "epochs": 1, "gamma": 0.4, "proximal": True}
    )
    c = torch.tensor([-2.0, -0.3, 0.02, 0.41, 1.5], dtype=torch.float64)
    h = torch.tensor([1.0, 0.5, 10.0, 20.0, 0.3], dtype=torch.float64)
    a = nn.Parameter(torch.ones(5, dtype=torch.float64))
    penalty = Penalty(config, [a], {"a": [(a, torch.arange(5)[:, None])]}, None)  # type: ignore[arg-type]
    adam = optimizer([a], lr=0.01, weight_decay=0.0)
    for step in range(6000):
        adam.param_groups[0]["lr"] = 0.01 * 0.999**step
        penalty.step_(adam, [h * (a.detach() - c)], step)
    expected = soft_threshold(c, 0.4 / h)
    assert torch.allclose(a.detach(), expected, atol=2e-3)
    assert torch.equal(a == 0, expected == 0) and (expected == 0).any()


def test_parameter_that_adam_has_not_stepped_is_not_shrunk() -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    adam = torch.optim.Adam(parameters, lr=0.1)
    parameters[0].grad = torch.tensor([2.0, -0.5])
    adam.step()
    first, second = proximal_rates(adam, parameters)
    assert torch.allclose(first, torch.tensor([0.05, 0.2]))
    assert second == 0.0


@pytest.mark.parametrize("seed", [0, 1])
def test_group_threshold_with_a_rate_for_each_element_is_the_minimum(seed: int) -> None:
    """0 = (x - value) / rate + t x / ||x|| where x is not zero, and ||value / rate|| <= t where it is."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(4, 500, generator=generator, dtype=torch.float64)
    rate = 3 * torch.rand(4, 500, generator=generator, dtype=torch.float64) ** 6 + 1e-9
    t = 40 * torch.rand(1, 500, generator=generator, dtype=torch.float64) ** 3
    t[:, :20] = 0
    x = group_soft_threshold(value, t, rate, lambda v: v.sum(0, keepdim=True))
    norm = x.norm(dim=0, keepdim=True)
    live = norm[0] > 0
    slope = (x - value) + rate * t * x / norm.clamp_min(1e-300)
    assert float(slope[:, live].abs().max()) < 1e-9
    assert torch.equal(~live, (value / rate).norm(dim=0) <= t[0])
    assert live[:20].all() and 0 < int((~live).sum()) < 400
    alike = group_soft_threshold(value, t, torch.full_like(value, 0.3), lambda v: v.sum(0, keepdim=True))
    same = group_soft_threshold(value, t, 0.3, lambda v: v.sum(0, keepdim=True))
    assert torch.allclose(alike, same, atol=1e-9)
