"""Costs and candidates of widths as tensors: against the costs of the groups, the paper's network, and formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import compress
from cases import CASES, groups_of
from compress.budget import PruningSchedule, WidthBounds
from compress.progress import ProgressDisplay
from compress.recipe import Recipe, Target
from compress.search.aps.candidates import WidthTable, candidate_widths
from compress.search.aps.width_cost import BudgetRatio, WidthCost, reward
from compress.search.base import Job

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [*CASES][::6])
def test_costs_are_those_of_the_groups(name: str) -> None:
    groups = groups_of(name)
    if not len(groups):
        pytest.skip("nothing to cut")
    rng, cost = np.random.default_rng(0), groups.cost
    kept = rng.integers(1, cost.widths // cost.num_heads + 1, (5, len(groups))) * cost.num_heads
    widths = torch.as_tensor(kept)
    for unit in ("macs", "params", "size", "dims"):
        expected = torch.as_tensor(getattr(cost, unit)(kept)).double()
        assert torch.equal(WidthCost(cost, unit, CPU)(widths), expected), unit
        assert torch.equal(WidthCost(cost, unit, CPU)(widths[0]), expected[0]), unit


class ChainOfResNet20(nn.Module):
    """The 19 convolutions of ResNet-20 without shortcuts, so that each layer has a width of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        strides = [1] * 7 + [2] + [1] * 5 + [2] + [1] * 5
        inputs = [3] + [width] * 18
        self.layers = nn.Sequential(
            *(nn.Conv2d(i, width, 3, s, 1, bias=False) for i, s in zip(inputs, strides, strict=True))
        )
        self.linear = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.linear(x.mean((2, 3)))


def test_widths_of_the_paper_take_20_6_million_multiply_adds() -> None:
    groups = compress.find_groups(ChainOfResNet20(64).eval(), torch.zeros(1, 3, 32, 32))
    widths = torch.tensor([8] * 7 + [16] * 4 + [32] * 3 + [64] * 5)
    assert len(groups) == len(widths)
    assert float(WidthCost(groups.cost, "macs", CPU)(widths)) == pytest.approx(20.6e6, abs=0.05e6)


def job_with(limits: dict[str, float], **budget: Any) -> Job:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    groups = compress.find_groups(model, torch.zeros(1, 4))
    recipe = Recipe.load({"search": {"method": "aps", "epochs": 1}, "budget": budget})
    display = ProgressDisplay(quiet=True)
    schedule = PruningSchedule(recipe, groups, model, model, torch.zeros(1, 4), None, 0, display, limits=limits)
    return Job(model, groups, compress.Classification(), 1, schedule=schedule)


@pytest.mark.parametrize(("unit", "dense"), [("macs", 92), ("params", 108), ("dims", 14)])
def test_ratio_is_the_cost_over_the_budget(unit: str, dense: int) -> None:
    ratio = BudgetRatio(job_with({unit: 0.4 * dense}, **{unit: 0.4}), CPU)
    assert float(ratio(torch.tensor([8, 6]))) == pytest.approx(1 / 0.4)


def test_ratio_of_several_limits_is_the_largest() -> None:
    ratio = BudgetRatio(job_with({"macs": 46.0, "dims": 10.0}, macs=0.5, dims=0.7), CPU)
    for widths in ([8, 6], [2, 6], [8, 2], [4, 3]):
        macs, dims = 4 * widths[0] + widths[0] * widths[1] + 2 * widths[1], sum(widths)
        assert float(ratio(torch.tensor(widths))) == pytest.approx(max(macs / 46, dims / 10))


def test_measured_times_give_the_time_of_widths() -> None:
    job = job_with({"latency": 0.5}, latency=0.5)
    assert isinstance(job.schedule, PruningSchedule) and job.schedule.measured_times is not None
    job.schedule.measured_times.copy_(torch.tensor([0.05, 0.02]))
    ratio = BudgetRatio(job, CPU)
    assert float(ratio(torch.tensor([8, 6]))) == pytest.approx(2)
    assert float(ratio(torch.tensor([4, 1]))) == pytest.approx((1 - 4 * 0.05 - 5 * 0.02) / 0.5)
    assert ratio.state()["dimension_times"].tolist() == pytest.approx([0.05, 0.02])


def test_without_a_budget_nothing_is_above_it() -> None:
    job = job_with({}, macs=0.5)
    job.schedule = None
    ratio = BudgetRatio(job, CPU)
    assert float(ratio(torch.tensor([8, 6]))) == 1


def test_reward_is_equation_11() -> None:
    for accuracy, ratio, alpha, beta in (
        (0.8, 0.5, 0.0, -0.1),
        (0.8, 2.0, 0.0, -0.1),
        (0.6, 0.5, 0.3, -1.0),
        (0.6, 1.0, 0.3, -1.0),
    ):
        expected = accuracy * ratio ** (alpha if ratio < 1 else beta)
        value = reward(
            torch.tensor(accuracy, dtype=torch.float64), torch.tensor(ratio, dtype=torch.float64), alpha, beta
        )
        assert float(value) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("candidates", "target", "expected"),
    [
        ((0.25, 0.5, 1.0), {}, [[2, 4, 8], [2, 3, 6]]),
        ((0.25, 0.5, 1.0), {"round_to": 4}, [[4, 8], [4, 6]]),
        ((4, 16), {}, [[4, 8], [4, 6]]),
        ((0.1, 1.0), {"min_keep": 3}, [[3, 8], [3, 6]]),
        ((0.25, 1.0), {"bounds": {"0": {"least": 3, "most": 5}}}, [[3, 5], [2, 6]]),
    ],
)
def test_candidates_are_fractions_or_numbers_within_the_bounds(candidates: Any, target: Any, expected: Any) -> None:
    groups = job_with({}, macs=0.5).groups
    bounds = WidthBounds.of(groups, Target.model_validate(target))
    assert candidate_widths(groups, candidates, bounds) == expected


def test_importance_is_the_probability_of_wider_candidates() -> None:
    ranks = [torch.tensor([2, 0, 3, 1]), torch.tensor([1, 0, 2])]
    table = WidthTable.of([[1, 2, 4], [3]], ranks)
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    for g, widths in enumerate([[1, 2, 4], [3]]):
        for d, rank in enumerate(ranks[g].tolist()):
            expected = sum(float(probabilities[g, k]) for k, c in enumerate(widths) if c > rank)
            assert float(table.importance(probabilities)[g][d]) == pytest.approx(expected, abs=2e-6)
        order = table.importance(probabilities)[g].argsort(descending=True)
        assert torch.equal(ranks[g][order], torch.arange(len(order))), "equal values are ordered by rank"
    masks = table.masks(torch.tensor([1, 0]))
    assert [mask.tolist() for mask in masks] == [[False, True, False, True], [True, True, True]]


def test_uniform_choices_have_equal_probability() -> None:
    table = WidthTable.of([[1, 2, 3], [1, 2]], [torch.arange(3), torch.arange(2)])
    numbers = torch.linspace(0, 1 - 2**-24, 600)
    chosen = torch.stack([table.uniform_choices(n.expand(2)) for n in numbers])
    assert torch.bincount(chosen[:, 0]).tolist() == [200, 200, 200]
    assert torch.bincount(chosen[:, 1]).tolist() == [300, 300]
    assert math.isclose(float(numbers[-1]), 1, abs_tol=1e-6)
