"""A budget is met from above and as tightly as one step allows."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from torch import nn

import compress
from cases import CASES, groups_of
from compress import BudgetError
from compress.budget.bounds import WidthBounds
from compress.budget.choose import choose_widths, smallest_fractions
from compress.graph import Groups
from compress.recipe import Budget, Target
from helpers.widths import BUDGET_CASES, random_importance, widths_of


def smallest(groups: Groups, budget: Budget, target: Target) -> float:
    """The smallest fraction that a budget of one limit can reach."""
    (fraction,) = smallest_fractions(groups, budget, target).values()
    return fraction


@pytest.mark.parametrize("unit", ["macs", "params", "dims", "size"])
@pytest.mark.parametrize("name", BUDGET_CASES)
def test_budget_is_met_and_no_group_could_be_wider(name: str, unit: str) -> None:
    groups = groups_of(name)
    measure = getattr(groups.cost, unit)
    for left, round_to, min_keep, seed in itertools.product((0.25, 0.5, 0.77, 1.0), (1, 2, 3), (1, 2), (0, 1)):
        target, budget = Target(round_to=round_to, min_keep=min_keep), Budget(**{unit: left})
        if smallest(groups, budget, target) > left:
            continue
        kept = widths_of(groups, choose_widths(groups, random_importance(groups, seed), budget, target))
        limit = left * int(measure(groups.cost.widths)) * (1 + 1e-12)
        assert int(measure(kept)) <= limit
        for i, full in enumerate(groups.cost.widths):
            assert min(min_keep, full) <= kept[i] <= full
            assert kept[i] % round_to == 0 or kept[i] == full
            if kept[i] < full:
                wider = kept.copy()
                wider[i] = min(kept[i] + round_to, full)
                assert int(measure(wider)) > limit, f"{groups.cost.names[i]} could keep {wider[i]}"


def greedy(groups: Groups, importance: dict[str, np.ndarray], left: float, unit: str) -> dict[str, list[int]]:
    """The definition, one dimension at a time: take the ranking's head for as long as it fits, then fill up."""
    measure = getattr(groups.cost, unit)
    limit = left * int(measure(groups.cost.widths)) * (1 + 1e-12)
    ranking = sorted(
        ((-value, i, u) for i, name in enumerate(groups.cost.names) for u, value in enumerate(importance[name])),
    )

    def kept(count: int) -> list[list[int]]:
        rows: list[list[int]] = [[u for _, i, u in ranking[:count] if i == j] for j in range(len(groups))]
        for i, row in enumerate(rows):  # at least one of each
            if not row:
                row.append(int(np.argmax(importance[groups.cost.names[i]])))
        return rows

    def cost(rows: list[list[int]]) -> int:
        return int(measure(np.array([len(row) for row in rows])))

    count = max(c for c in range(len(ranking) + 1) if cost(kept(c)) <= limit)
    rows = kept(count)
    order = []
    for i, row in enumerate(rows):
        waiting = [rank for rank, (_, j, u) in enumerate(ranking) if j == i and u not in row]
        order.append((waiting[0] if waiting else len(ranking), i))
    for _, i in sorted(order):
        for _, j, u in ranking:
            if j == i and u not in rows[i]:
                rows[i].append(u)
                if cost(rows) > limit:
                    rows[i].pop()
                    break
    return {name: sorted(row) for name, row in zip(groups.cost.names, rows, strict=True)}


@pytest.mark.parametrize("unit", ["macs", "params", "dims"])
@pytest.mark.parametrize("name", BUDGET_CASES)
def test_choice_is_the_greedy_one(name: str, unit: str) -> None:
    groups = groups_of(name)
    for left, seed in itertools.product((0.3, 0.5, 0.8, 0.95), range(3)):
        importance = random_importance(groups, seed)
        if smallest(groups, Budget(**{unit: left}), Target(min_keep=1)) > left:
            continue
        found = choose_widths(groups, importance, Budget(**{unit: left}), Target(min_keep=1))
        assert {n: k.tolist() for n, k in found.items()} == greedy(groups, importance, left, unit)


def test_no_choice_of_widths_in_the_ranking_is_better_on_a_tiny_case() -> None:
    """Among all widths that follow the importance, none that fits holds every dimension of ours and one more."""
    groups = groups_of("chain")
    ours = widths_of(groups, choose_widths(groups, random_importance(groups), Budget(macs=0.4), Target(min_keep=1)))
    limit = 0.4 * int(groups.cost.macs(groups.cost.widths))
    grid = np.stack(np.meshgrid(*[np.arange(1, w + 1) for w in groups.cost.widths], indexing="ij"), -1).reshape(-1, 3)
    fits = grid[groups.cost.macs(grid) <= limit]
    above = fits[(fits >= ours).all(1)]
    assert above.tolist() == [ours.tolist()]


@pytest.mark.parametrize("name", BUDGET_CASES)
def test_what_is_kept_of_each_group_is_its_most_important(name: str) -> None:
    groups, importance = groups_of(name), random_importance(groups_of(name))
    for group, kept in choose_widths(groups, importance, Budget(params=0.6), Target()).items():
        best = np.argsort(-importance[group])[: len(kept)]
        assert sorted(best.tolist()) == kept.tolist()


@pytest.mark.parametrize("unit", ["macs", "params"])
def test_more_budget_never_costs_less(unit: str) -> None:
    groups = groups_of("residual_stream_with_projection")
    importance, measure = random_importance(groups), getattr(groups.cost, unit)
    spent = [
        int(measure(widths_of(groups, choose_widths(groups, importance, Budget(**{unit: left}), Target(min_keep=1)))))
        for left in np.linspace(0.1, 1, 25).tolist()
    ]
    assert spent == sorted(spent)
    assert spent[-1] == int(measure(groups.cost.widths))


def test_whole_percentages_are_not_rounded_down() -> None:
    """29 % of 100 dimensions are 29, whatever 0.29 * 100 is in floating point."""
    model = nn.Sequential(nn.Linear(3, 100), nn.ReLU(), nn.Linear(100, 2))
    groups = compress.find_groups(model, torch.randn(2, 3))
    for percent in (7, 14, 28, 29, 55, 56, 57, 58):
        budget = compress.Recipe.load({"budget": {"dims": f"{percent}%"}}).budget
        kept = choose_widths(groups, random_importance(groups), budget, Target(round_to=1))
        assert len(kept["0"]) == percent


def test_scale_of_importance_does_not_matter_and_equal_importance_is_settled_by_position() -> None:
    groups = groups_of("chain")
    importance = random_importance(groups)
    pick = [
        choose_widths(groups, {n: s * v for n, v in importance.items()}, Budget(macs=0.5), Target()) for s in (1, 1e-9)
    ]
    assert all(pick[0][n].tolist() == pick[1][n].tolist() for n in pick[0])
    flat = choose_widths(groups, {n: np.zeros_like(v) for n, v in importance.items()}, Budget(macs=0.5), Target())
    assert all(kept.tolist() == list(range(len(kept))) for kept in flat.values())


def test_infinite_importance_is_kept() -> None:
    groups = groups_of("chain")
    importance = random_importance(groups)
    importance["1.0"][3] = np.inf
    assert 3 in choose_widths(groups, importance, Budget(macs=0.2), Target(min_keep=1))["1.0"]


def test_budget_out_of_reach_is_named() -> None:
    groups, target = groups_of("residual_stream"), Target(min_keep=4)
    with pytest.raises(
        BudgetError, match=r"budget\.macs: 1% .* cannot be reached; .* \(3 groups offered, \d+ refused\)"
    ):
        choose_widths(groups, random_importance(groups), Budget(macs=0.01), target)
    kept = choose_widths(
        groups, random_importance(groups), Budget(macs=smallest(groups, Budget(macs=0.01), target)), target
    )
    assert widths_of(groups, kept).tolist() == WidthBounds.of(groups, target).least.tolist() == [4, 4, 4]


def test_smallest_budget_that_is_named_can_be_reached() -> None:
    """What the message says is rounded for the reader, and still true."""
    wrong = []
    for name, unit in itertools.product(CASES, ("macs", "params")):
        if not len(groups := groups_of(name)):
            continue
        tiny = Budget(**{unit: 1e-6})
        with pytest.raises(BudgetError, match="the smallest that can is") as caught:
            choose_widths(groups, random_importance(groups), tiny, Target())
        named = float(re.search(r"the smallest that can is ([\d.]+)%", str(caught.value))[1]) / 100
        assert named == pytest.approx(smallest(groups, tiny, Target()), rel=0.02)
        try:
            choose_widths(groups, random_importance(groups), Budget(**{unit: named}), Target())
        except BudgetError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, wrong


def test_network_without_groups_is_out_of_reach() -> None:
    groups = groups_of("tied_autoencoder")
    with pytest.raises(BudgetError, match=r"100% \(0 groups offered, \d+ refused\)"):
        choose_widths(groups, {}, Budget(params=0.5), Target())
    assert choose_widths(groups, {}, Budget(params=1.0), Target()) == {}


def test_number_of_cost_evaluations_grows_like_the_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = compress.graph.costs.Cost.macs
    monkeypatch.setattr(
        compress.graph.costs.Cost, "macs", lambda self, kept: (calls.append(1), original(self, kept))[1]
    )
    counts = []
    for width in (64, 4096):
        sizes = [nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 2)]
        groups = compress.find_groups(nn.Sequential(*sizes), torch.randn(2, 4))
        calls.clear()
        choose_widths(groups, random_importance(groups), Budget(macs=0.37), Target())
        counts.append(len(calls))
    assert counts[1] <= counts[0] + 2 * 6 + 2  # 64 times as wide: six more halvings, in the ranking and in the filling


def test_all_cases_reach_their_smallest_fraction() -> None:
    for name in CASES:
        if not len(groups := groups_of(name)):
            continue
        least = smallest(groups, Budget(params=0.5), Target())
        kept = choose_widths(groups, random_importance(groups), Budget(params=min(1.0, least)), Target())
        assert int(groups.cost.params(widths_of(groups, kept))) == int(
            groups.cost.params(WidthBounds.of(groups, Target()).least)
        )
