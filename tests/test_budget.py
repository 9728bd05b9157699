"""A budget is met from above and as tightly as one step allows."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from case import groups_of
from cases import CASES
from torch import nn

import compress
from compress import BudgetError
from compress.budget import Bounds, choose, smallest
from compress.groups import Groups
from compress.recipe import Bound, Budget, Target

NAMES = ["chain", "residual_stream_with_projection", "dense_connections", "few_large_groups", "many_small_groups"]


def random_importance(groups: Groups, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {g.name: random.random(g.width) for g in groups}


def widths(groups: Groups, keep: dict[str, Any]) -> np.ndarray:
    return np.array([len(keep[name]) for name in groups.cost.names])


@pytest.mark.parametrize("unit", ["macs", "params", "dims"])
@pytest.mark.parametrize("name", NAMES)
def test_budget_is_met_and_no_group_could_be_wider(name: str, unit: str) -> None:
    groups = groups_of(name)
    measure = getattr(groups.cost, unit)
    for left, round_to, min_keep, seed in itertools.product((0.25, 0.5, 0.77, 1.0), (1, 2, 3), (1, 2), (0, 1)):
        target, budget = Target(round_to=round_to, min_keep=min_keep), Budget(**{unit: left})
        if smallest(groups, budget, target) > left:
            continue
        kept = widths(groups, choose(groups, random_importance(groups, seed), budget, target))
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
@pytest.mark.parametrize("name", NAMES)
def test_choice_is_the_greedy_one(name: str, unit: str) -> None:
    groups = groups_of(name)
    for left, seed in itertools.product((0.3, 0.5, 0.8, 0.95), range(3)):
        importance = random_importance(groups, seed)
        if smallest(groups, Budget(**{unit: left}), Target(min_keep=1)) > left:
            continue
        found = choose(groups, importance, Budget(**{unit: left}), Target(min_keep=1))
        assert {n: k.tolist() for n, k in found.items()} == greedy(groups, importance, left, unit)


def test_no_choice_of_widths_in_the_ranking_is_better_on_a_tiny_case() -> None:
    """Among all widths that follow the importance, none that fits holds every dimension of ours and one more."""
    groups = groups_of("chain")
    ours = widths(groups, choose(groups, random_importance(groups), Budget(macs=0.4), Target(min_keep=1)))
    limit = 0.4 * int(groups.cost.macs(groups.cost.widths))
    grid = np.stack(np.meshgrid(*[np.arange(1, w + 1) for w in groups.cost.widths], indexing="ij"), -1).reshape(-1, 3)
    fits = grid[groups.cost.macs(grid) <= limit]
    above = fits[(fits >= ours).all(1)]
    assert above.tolist() == [ours.tolist()]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_of_each_group_is_its_most_important(name: str) -> None:
    groups, importance = groups_of(name), random_importance(groups_of(name))
    for group, kept in choose(groups, importance, Budget(params=0.6), Target()).items():
        best = np.argsort(-importance[group])[: len(kept)]
        assert sorted(best.tolist()) == kept.tolist()


@pytest.mark.parametrize("unit", ["macs", "params"])
def test_more_budget_never_costs_less(unit: str) -> None:
    groups = groups_of("residual_stream_with_projection")
    importance, measure = random_importance(groups), getattr(groups.cost, unit)
    spent = [
        int(measure(widths(groups, choose(groups, importance, Budget(**{unit: left}), Target(min_keep=1)))))
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
        kept = choose(groups, random_importance(groups), budget, Target())
        assert len(kept["0"]) == percent


def test_scale_of_importance_does_not_matter_and_equal_importance_is_settled_by_position() -> None:
    groups = groups_of("chain")
    importance = random_importance(groups)
    pick = [choose(groups, {n: s * v for n, v in importance.items()}, Budget(macs=0.5), Target()) for s in (1, 1e-9)]
    assert all(pick[0][n].tolist() == pick[1][n].tolist() for n in pick[0])
    flat = choose(groups, {n: np.zeros_like(v) for n, v in importance.items()}, Budget(macs=0.5), Target())
    assert all(kept.tolist() == list(range(len(kept))) for kept in flat.values())


def test_infinite_importance_is_kept() -> None:
    groups = groups_of("chain")
    importance = random_importance(groups)
    importance["1.0"][3] = np.inf
    assert 3 in choose(groups, importance, Budget(macs=0.2), Target(min_keep=1))["1.0"]


def test_tensors_and_arrays_are_the_same() -> None:
    groups = groups_of("chain")
    importance = random_importance(groups)
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in importance.items()}
    a, b = (choose(groups, i, Budget(macs=0.5), Target()) for i in (importance, tensors))
    assert all(a[name].tolist() == b[name].tolist() for name in a)


def test_budget_out_of_reach_is_named() -> None:
    groups, target = groups_of("residual_stream"), Target(min_keep=4)
    with pytest.raises(
        BudgetError, match=r"budget\.macs: 1% .* cannot be reached; .* \(3 groups offered, \d+ refused\)"
    ):
        choose(groups, random_importance(groups), Budget(macs=0.01), target)
    kept = choose(groups, random_importance(groups), Budget(macs=smallest(groups, Budget(macs=0.01), target)), target)
    assert widths(groups, kept).tolist() == Bounds.of(groups, target).least.tolist() == [4, 4, 4]


def test_smallest_budget_that_is_named_can_be_reached() -> None:
    """What the message says is rounded for the reader, and still true."""
    wrong = []
    for name, unit in itertools.product(CASES, ("macs", "params")):
        if not len(groups := groups_of(name)):
            continue
        tiny = Budget(**{unit: 1e-6})
        with pytest.raises(BudgetError, match="the smallest that can is") as caught:
            choose(groups, random_importance(groups), tiny, Target())
        named = float(re.search(r"the smallest that can is ([\d.]+)%", str(caught.value))[1]) / 100
        assert named == pytest.approx(smallest(groups, tiny, Target()), rel=0.02)
        try:
            choose(groups, random_importance(groups), Budget(**{unit: named}), Target())
        except BudgetError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, wrong


def test_network_without_groups_is_out_of_reach() -> None:
    groups = groups_of("tied_autoencoder")
    with pytest.raises(BudgetError, match=r"100% \(0 groups offered, \d+ refused\)"):
        choose(groups, {}, Budget(params=0.5), Target())
    assert choose(groups, {}, Budget(params=1.0), Target()) == {}


def test_wrong_importance_is_named() -> None:
    groups = groups_of("chain")
    right = random_importance(groups)
    broken = right["1.0"].copy()
    broken[[2, 4]] = np.nan
    with pytest.raises(ValueError, match=r"importance of 1\.0: 2 of 6 are NaN, the first at 2\. Look for NaN"):
        choose(groups, right | {"1.0": broken}, Budget(macs=0.5), Target())
    with pytest.raises(ValueError, match=r"importance of 1\.0: expected 6 numbers, got shape \[5\]"):
        choose(groups, right | {"1.0": broken[:5]}, Budget(macs=0.5), Target())
    with pytest.raises(ValueError, match=r"importance: group 1\.0 is missing"):
        choose(groups, {n: v for n, v in right.items() if n != "1.0"}, Budget(macs=0.5), Target())


def test_number_of_cost_evaluations_grows_like_the_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = compress.cost.Cost.macs
    monkeypatch.setattr(compress.cost.Cost, "macs", lambda self, kept: (calls.append(1), original(self, kept))[1])
    counts = []
    for width in (64, 4096):
        sizes = [nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 2)]
        groups = compress.find_groups(nn.Sequential(*sizes), torch.randn(2, 4))
        calls.clear()
        choose(groups, random_importance(groups), Budget(macs=0.37), Target())
        counts.append(len(calls))
    assert counts[1] <= counts[0] + 2 * 6 + 2  # 64 times as wide: six more halvings, in the ranking and in the filling


def test_all_cases_reach_what_is_said_to_be_the_smallest() -> None:
    for name in CASES:
        if not len(groups := groups_of(name)):
            continue
        least = smallest(groups, Budget(params=0.5), Target())
        kept = choose(groups, random_importance(groups), Budget(params=min(1.0, least)), Target())
        assert int(groups.cost.params(widths(groups, kept))) == int(
            groups.cost.params(Bounds.of(groups, Target()).least)
        )


def allowed(width: int, bound: Bound | None, target: Target) -> list[int]:
    """All widths that a group may get, by trying every one."""
    least, most = (bound.least, bound.most) if bound else (None, None)
    fits = [w for w in range(1, width + 1) if w % target.round_to == 0 or w == width]
    if most is not None:
        fits = [w for w in fits if w <= (most if isinstance(most, int) else most * width)]
    if least is not None:
        return [w for w in fits if w >= (least if isinstance(least, int) else least * width)]
    return [w for w in fits if w >= target.min_keep] or fits[-1:]


def bounded_greedy(groups: Groups, importance: Any, limit: float, unit: str, table: list[list[int]]) -> list[int]:
    """The definition over tables of allowed widths: the ranking's head for as long as it fits, then fill up."""
    measure = getattr(groups.cost, unit)
    ranking = sorted((-v, i, u) for i, n in enumerate(groups.cost.names) for u, v in enumerate(importance[n]))

    def rounded(count: int) -> list[int]:
        counts = [sum(j == i for _, j, _ in ranking[:count]) for i in range(len(table))]
        return [next((w for w in row if w >= c), row[-1]) for row, c in zip(table, counts, strict=True)]

    kept = rounded(max(c for c in range(len(ranking) + 1) if int(measure(np.array(rounded(c)))) <= limit))

    def place(i: int) -> int:
        mine = [rank for rank, (_, j, _) in enumerate(ranking) if j == i]
        return mine[kept[i]] if kept[i] < len(mine) else len(ranking)

    for i in sorted(range(len(table)), key=place):
        for w in table[i]:
            wider = [*kept[:i], max(w, kept[i]), *kept[i + 1 :]]
            if int(measure(np.array(wider))) <= limit:
                kept = wider
    return kept


def random_bound(random: np.random.Generator, width: int) -> Bound | None:
    low, high = sorted(int(n) for n in random.integers(1, width + 1, 2))
    least, most = (low / width, high / width) if random.random() < 0.5 else (low, high)
    return [Bound(least=least, most=most), Bound(least=least), Bound(most=most), None][int(random.integers(4))]


@pytest.mark.parametrize("unit", ["macs", "params", "dims"])
@pytest.mark.parametrize("name", NAMES)
def test_bounded_choice_is_the_greedy_one_over_the_allowed_widths(name: str, unit: str) -> None:
    groups, random = groups_of(name), np.random.default_rng(len(name))
    measure, tried, cut = getattr(groups.cost, unit), 0, 0
    whole = int(measure(groups.cost.widths))
    for seed in range(60):
        given = {g.name: random_bound(random, g.width) for g in groups}
        round_to, min_keep = (int(n) for n in random.integers(1, 4, 2))
        target = Target(bounds={n: b for n, b in given.items() if b}, round_to=round_to, min_keep=min_keep)
        table = [allowed(g.width, given[g.name], target) for g in groups]
        if not all(table):
            with pytest.raises(ValueError, match=r"target\.bounds: group .* no multiple of \d lies between least"):
                Bounds.of(groups, target)
            continue
        bounds, importance = Bounds.of(groups, target), random_importance(groups, seed)
        assert [*zip(bounds.least, bounds.full, strict=True)] == [(row[0], row[-1]) for row in table]
        limit = int(random.integers(int(measure(bounds.least)), whole + 1))
        kept = widths(groups, choose(groups, importance, Budget(**{unit: 0.5}), target, limit=limit))
        assert kept.tolist() == bounded_greedy(groups, importance, limit, unit, table), target
        tried, cut = tried + 1, cut + (int(measure(kept)) < whole)
    assert tried >= 10 and cut >= tried // 2


def test_explicit_bounds_go_before_min_keep() -> None:
    groups = groups_of("chain")
    name, full = groups.cost.names[1], int(groups.cost.widths[1])
    spans = [({"least": 1}, 1, full), ({"most": 2}, 2, 2), ({"most": "1%"}, 1, 1), ({"least": 1.0}, full, full)]
    for given, least, most in [*spans, ({"most": full + 5}, 3, full)]:
        found = Bounds.of(groups, Target(min_keep=3, bounds={name: Bound(**given)}))
        assert (found.least[1], found.full[1]) == (least, most)
        assert (found.least[0], found.full[0]) == (3, groups.cost.widths[0])


def test_parts_of_a_width_are_not_rounded_across_a_whole_number() -> None:
    """29 % of 100 are 29 and 7 % are 7, whatever the products are in floating point."""
    groups = compress.find_groups(nn.Sequential(nn.Linear(3, 100), nn.ReLU(), nn.Linear(100, 2)), torch.randn(2, 3))
    for part in range(1, 101):
        found = Bounds.of(groups, Target(bounds={"0": Bound(least=f"{part}%", most=f"{part}%")}))
        assert found.least.tolist() == found.full.tolist() == [part]


def test_bounds_refer_to_the_dense_width_in_later_rounds() -> None:
    groups = groups_of("chain")
    name, width = groups.cost.names[1], int(groups.cost.widths[1])
    half, most = Target(bounds={name: Bound(least=0.5)}), Target(bounds={name: Bound(most=0.25)})
    assert Bounds.of(groups, half).least[1] == -(-width // 2)
    assert Bounds.of(groups, half, {name: 2 * width - 2}).least[1] == width - 1
    assert Bounds.of(groups, half, {name: 4 * width}).least[1] == width  # what is gone is gone
    assert Bounds.of(groups, most, {name: 2 * width}).full[1] == width // 2
    assert Bounds.of(groups, Target(bounds={"gone": Bound(least=3)}), {"gone": 9}).least.tolist() == [2, 2, 2]
    kept = choose(groups, random_importance(groups), Budget(macs=1.0), most, dense={name: 2 * width})
    assert len(kept[name]) == width // 2


def test_bounds_are_for_groups_modules_and_expressions_and_the_last_counts() -> None:
    groups = groups_of("residual_stream")
    names, dense = groups.cost.names, {g.name: g.width for g in groups}
    written = [(g.name, s.tensor.rpartition(".")[0]) for g in groups for s in g.writers]
    stream, alias = next((group, module) for group, module in written if module not in names)

    def most(**bounds: Any) -> dict[str, int]:
        return dict(zip(names, Bounds.of(groups, Target(bounds=bounds)).full.tolist(), strict=True))

    assert most(**{names[0]: Bound(most=3)}) == dense | {names[0]: 3}
    assert most(**{alias: Bound(most=3)})[stream] == 3
    assert most(**{"re:.*": Bound(most=3)}) == dict.fromkeys(names, 3)
    assert most(**{"re:.*": Bound(most=3), names[0]: Bound(most=4)}) == dict.fromkeys(names, 3) | {names[0]: 4}
    assert most(**{names[0]: Bound(most=4), "re:.*": Bound(most=3)}) == dict.fromkeys(names, 3)
    assert most(**{names[0]: Bound(most=4), "re:.*": Bound(least=3)}) == dense
    inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    groups = compress.find_groups(nn.Sequential(inner, nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(2, 4))
    assert groups.cost.names == ("0.0", "0.2", "1")
    assert Bounds.of(groups, Target(bounds={"0": Bound(most=5)})).full.tolist() == [5, 5, 6]


def test_bound_without_a_group_is_named() -> None:
    groups = groups_of("chain")
    first = groups.cost.names[0]
    nearest = rf"'{re.escape(first)}x' matches no group; the nearest names are .*\b{re.escape(first)}\b"
    with pytest.raises(ValueError, match=rf"target\.bounds: {nearest}.*\. Give the full name"):
        choose(groups, random_importance(groups), Budget(macs=0.5), Target(bounds={f"{first}x": Bound(least=2)}))
    refused = next(g for g in map(groups_of, CASES) if g.refused)
    name, reason = refused.refused[0].name, refused.refused[0].reason
    with pytest.raises(ValueError, match=re.escape(f"matches no group; {name} is left alone: {reason}. Give")):
        Bounds.of(refused, Target(bounds={f"re:{re.escape(name)}": Bound(least=2)}))


def test_bounds_that_leave_no_width_are_named() -> None:
    groups = groups_of("chain")
    assert groups.cost.names[1] == "1.0" and groups.cost.widths[1] == 6
    for bound, round_to, message in (
        (Bound(least=7), 1, "group 1.0 has 6 dimensions; it cannot keep 7 at least"),
        (Bound(least=0.5, most=2), 1, "group 1.0 of 6 dimensions: no width lies between least 3 and most 2. Loosen"),
        (Bound(least=3, most=5), 6, "no multiple of 6 lies between least 3 and most 5. Loosen the bound, or lower"),
        (Bound(most=3), 4, "no multiple of 4 lies between least 1 and most 3"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            Bounds.of(groups, Target(round_to=round_to, bounds={"1.0": bound}))


def test_bounds_and_roundings_that_stand_in_the_way_are_named() -> None:
    groups = groups_of("chain")
    free = compress.budget.percent(smallest(groups, Budget(macs=0.5), Target()))
    for name, value in (("bounds", {"re:.*": Bound(least="90%")}), ("round_to", 1000)):
        match = rf"Without target\.{name} it would be {free}\. .* lower target\.{name}\."
        with pytest.raises(BudgetError, match=match):
            choose(groups, random_importance(groups), Budget(macs=0.5), Target(**{name: value}))
    with pytest.raises(BudgetError, match=r"refused\)\. Raise the budget, .* lower target\.min_keep\."):
        choose(groups, random_importance(groups), Budget(macs=0.01), Target(bounds={"re:.*": Bound(least=2)}))


def test_limit_goes_before_the_budget() -> None:
    groups = groups_of("chain")
    importance, whole = random_importance(groups), int(groups.cost.params(groups.cost.widths))
    for left in (0.4, 0.7, 1.0):
        by_budget = choose(groups, importance, Budget(params=left), Target())
        by_limit = choose(groups, importance, Budget(params=0.5), Target(), limit=left * whole)
        assert all(by_budget[n].tolist() == by_limit[n].tolist() for n in by_budget)
    least = int(groups.cost.params(Bounds.of(groups, Target()).least))
    with pytest.raises(BudgetError, match=rf"budget\.params: {least - 1} cannot be reached; .* that can is {least} \("):
        choose(groups, importance, Budget(params=0.5), Target(), limit=least - 1)
