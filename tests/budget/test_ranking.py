"""Rankings: dimensions of different groups are compared by the formulas of each ranking."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import compress
from cases import groups_of
from compress.budget.choose import choose_widths
from compress.budget.ranking import comparable_importance
from compress.budget.units import UNITS
from compress.graph import Groups
from compress.recipe import Bound, Budget, Target
from compress.search.magnitude import Magnitude
from compress.search.netslim import Netslim
from compress.search.taylor import Taylor
from helpers.widths import BUDGET_CASES, random_importance, widths_of


def price(groups: Groups, i: int, unit: str) -> int:
    """What one dimension of the dense group costs, by subtraction."""
    one = groups.cost.widths.copy()
    one[i] -= 1
    measure = getattr(groups.cost, unit)
    return int(measure(groups.cost.widths)) - int(measure(one))


@pytest.mark.parametrize("unit", ["macs", "params", "dims", "latency"])
@pytest.mark.parametrize("name", BUDGET_CASES)
def test_rankings_are_what_they_say(name: str, unit: str) -> None:
    groups, cost_unit = groups_of(name), "macs" if unit == "latency" else unit
    importance = {n: v - 0.3 for n, v in random_importance(groups).items()}
    as_it_is, relative, per_cost = (
        comparable_importance(groups, importance, r, unit) for r in ("global", "group", "cost")
    )
    whole = int(getattr(groups.cost, cost_unit)(groups.cost.widths))
    for i, group in enumerate(groups.cost.names):
        value = importance[group]
        assert as_it_is[group].tolist() == value.tolist()
        assert relative[group] == pytest.approx(value / (sum(abs(v) for v in value) / len(value)))
        assert per_cost[group] == pytest.approx(value / (price(groups, i, cost_unit) / whole))


def test_ranking_by_group_takes_zeros_and_infinities() -> None:
    groups = groups_of("chain")
    importance = {n: np.zeros_like(v) for n, v in random_importance(groups).items()}
    importance["1.0"][:3] = [np.inf, 2, 4]
    ranked = comparable_importance(groups, importance, "group", "macs")
    assert ranked["1.0"][:3].tolist() == [np.inf, 2 / (6 / 5), 4 / (6 / 5)]
    assert all((ranked[n] == 0).all() for n in ranked if n != "1.0")


def test_ranking_by_group_forgets_the_scale_of_each_group() -> None:
    groups, importance = groups_of("chain"), random_importance(groups_of("chain"))
    scaled = {n: 10.0**i * v for i, (n, v) in enumerate(importance.items())}
    a, b = (choose_widths(groups, v, Budget(macs=0.5), Target(), ranking="group") for v in (importance, scaled))
    assert all(a[n].tolist() == b[n].tolist() for n in a)
    assert (
        widths_of(groups, choose_widths(groups, scaled, Budget(macs=0.5), Target())).tolist()
        != widths_of(groups, a).tolist()
    )


def two_prices() -> Groups:
    """Two hidden layers that are read alike and written at 9 and at 1 parameters a dimension, two more to be read."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dear, self.dear_out = nn.Linear(9, 6, bias=False), nn.Linear(6, 2, bias=False)
            self.cheap, self.cheap_out = nn.Linear(1, 6, bias=False), nn.Linear(6, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.dear_out(self.dear(x).relu()), self.cheap_out(self.cheap(x[:, :1]).relu())], 1)

    return compress.find_groups(Two(), torch.randn(2, 9))


def test_ranking_by_cost_fills_a_knapsack_by_value_per_weight() -> None:
    """11 and 3 parameters a dimension: at equal prices per value the order is that of the densities."""
    groups = two_prices()
    assert [price(groups, i, "params") for i in range(2)] == [11, 3]
    importance = {"dear": np.array([22.0, 11, 10, 9, 8, 7]), "cheap": np.array([9.0, 4.5, 3.6, 2.4, 1.5, 0.3])}
    items = [(v / w, v, w, n) for (n, vs), w in zip(importance.items(), (11, 3), strict=True) for v in vs]
    for room in range(14, 85):
        taken = {"dear": [max(importance["dear"])], "cheap": [max(importance["cheap"])]}  # one of each in any case
        left = room - 14
        for _, value, weight, name in sorted(items, reverse=True):
            if value in taken[name]:
                continue
            if weight > left:
                break
            taken[name].append(value)
            left -= weight
        for name, weight in (("dear", 11), ("cheap", 3)):  # what still fits
            while left >= weight and len(taken[name]) < 6:
                taken[name].append(sorted(importance[name], reverse=True)[len(taken[name])])
                left -= weight
        limits = {"params": room}
        found = choose_widths(groups, importance, Budget(params=0.5), Target(min_keep=1), ranking="cost", limits=limits)
        assert {n: sorted(importance[n][k]) for n, k in found.items()} == {n: sorted(v) for n, v in taken.items()}


def test_what_costs_nothing_is_ranked_first_in_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = two_prices()
    monkeypatch.setattr(
        compress.graph.costs.Cost, "macs", lambda self, kept: np.asarray(kept)[..., 0] * 5
    )  # cheap is free
    importance = {"dear": np.arange(6.0) + 10, "cheap": np.array([0.1, 0.5, 0.3, 0.2, 0.6, 0.4])}
    assert np.isinf(comparable_importance(groups, importance, "cost", "macs")["cheap"]).all()
    keep = choose_widths(groups, importance, Budget(macs=0.5), Target(bounds={"cheap": Bound(most=3)}), ranking="cost")
    assert keep["cheap"].tolist() == [1, 4, 5] and keep["dear"].tolist() == [3, 4, 5]


def test_unknown_ranking_is_named() -> None:
    groups = groups_of("chain")
    with pytest.raises(
        ValueError, match="ranking: expected balanced, bounded, cost, global, group or lamp; got 'best'"
    ):
        comparable_importance(groups, random_importance(groups), "best", "macs")  # type: ignore[arg-type]


def best(values: list[float], one: float) -> float:
    """The definition of LAMP, for one of them; the root is ours."""
    return (one / sum(v for v in values if v >= one)) ** 0.5


@pytest.mark.parametrize("name", BUDGET_CASES)
def test_lamp_is_the_part_in_what_is_no_less_important_per_cost(name: str) -> None:
    groups, importance = groups_of(name), random_importance(groups_of(name))
    ranked, whole = comparable_importance(groups, importance, "lamp", "macs"), int(groups.cost.macs(groups.cost.widths))
    for i, group in enumerate(groups.cost.names):
        values = importance[group].tolist()
        expected = [best(values, v) / (price(groups, i, "macs") / whole) for v in values]
        assert ranked[group] == pytest.approx(expected)
        assert (np.argsort(-ranked[group], kind="stable") == np.argsort(-importance[group], kind="stable")).all()


def test_lamp_takes_zeros_infinities_and_numbers_below_zero() -> None:
    groups = groups_of("chain")
    importance = {n: np.zeros_like(v) for n, v in random_importance(groups).items()}
    importance["1.0"][:4] = [np.inf, 3, 1, -2]
    ranked = comparable_importance(groups, importance, "lamp", "macs")
    per = ranked["1.0"][1]  # the largest that is finite
    assert ranked["1.0"].tolist() == [np.inf, per, pytest.approx(per / 2), *[0] * 3] and per > 0
    assert all((ranked[n] == 0).all() for n in ranked if n != "1.0")


def test_lamp_empties_no_group_before_the_others() -> None:
    """Where importance per cost leaves a group of small numbers what the others have no use for."""
    groups = two_prices()
    importance = {"dear": np.arange(1.0, 7), "cheap": 1e-6 * np.arange(1.0, 7)}
    by_cost, by_lamp = (
        choose_widths(groups, importance, Budget(params=0.5), Target(), ranking=r) for r in ("cost", "lamp")
    )
    assert len(by_cost["cheap"]) == 3 and len(by_lamp["cheap"]) == 6
    scaled = {"dear": importance["dear"], "cheap": 1e12 * importance["cheap"]}
    again = choose_widths(groups, scaled, Budget(params=0.5), Target(), ranking="lamp")
    assert {n: k.tolist() for n, k in again.items()} == {n: k.tolist() for n, k in by_lamp.items()}


def test_bounded_ranks_as_global_but_empties_no_group() -> None:
    """The k-th best of a group's n dimensions counts as one of the best 3/2 k/n of all."""
    groups = two_prices()
    importance = {"dear": np.arange(1.0, 7), "cheap": 1e-6 * np.arange(1.0, 7)}
    ranked = comparable_importance(groups, importance, "bounded", "params")
    assert (-ranked["dear"]).tolist() == [k / 12 for k in (6, 5, 4, 3, 2, 1)]
    assert (-ranked["cheap"]).tolist() == pytest.approx([min((6 + k) / 12, 1.5 * k / 6) for k in (6, 5, 4, 3, 2, 1)])
    by_value, bounded = (
        choose_widths(groups, importance, Budget(dims=0.5), Target(min_keep=1), ranking=r)
        for r in ("global", "bounded")
    )
    assert [len(by_value[name]) for name in importance] == [5, 1]  # 6 and 0, but for min_keep
    assert [len(bounded[name]) for name in importance] == [5, 1]  # 3/2 of a sixth of the group is a quarter of all
    three_quarters = choose_widths(groups, importance, Budget(dims=0.75), Target(min_keep=1), ranking="bounded")
    assert [len(three_quarters[name]) for name in importance] == [6, 3]
    even = {"dear": np.array([1.0, 3, 5, 7, 9, 11]), "cheap": np.array([2.0, 4, 6, 8, 10, 12])}
    plain, same = (choose_widths(groups, even, Budget(dims=0.5), Target(), ranking=r) for r in ("global", "bounded"))
    assert {n: k.tolist() for n, k in plain.items()} == {n: k.tolist() for n, k in same.items()}


def test_balanced_is_lamp_where_costs_are_alike_and_bounded_where_they_are_not() -> None:
    groups = two_prices()
    importance = {"dear": np.arange(1.0, 7), "cheap": 0.01 * np.arange(1.0, 7)}
    prices = UNITS["params"].cost_per_dimension(groups)
    spread = prices.max() / prices.min()
    for factor, expected in ((spread, "lamp"), (0.99 * spread, "bounded")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("compress.budget.ranking.EVEN_COSTS", factor)
            ranked = comparable_importance(groups, importance, "balanced", "params")
        same = comparable_importance(groups, importance, expected, "params")
        assert all((ranked[name] == same[name]).all() for name in ranked)


def test_auto_depends_on_what_is_cut_and_on_the_budget() -> None:
    inner, stream = groups_of("chain"), groups_of("residual_stream")
    assert {g.kind for g in inner} == {"channels"} and "residual" in {g.kind for g in stream}
    for groups, unit, ranking in ((inner, "macs", "balanced"), (inner, "dims", "group"), (stream, "macs", "group")):
        assert Magnitude.Config().ranking_for(groups, unit) == ranking
        assert Taylor.Config().ranking_for(groups, unit) == "cost"
        assert Netslim.Config(epochs=1, gamma=1e-4).ranking_for(groups, unit) == (
            "cost" if ranking == "balanced" else ranking
        )
        assert Netslim.Config(epochs=1).ranking_for(groups, unit) == "cost"
        assert Magnitude.Config(ranking="global").ranking_for(groups, unit) == "global"
