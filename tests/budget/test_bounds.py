"""Bounds on widths: minimum, maximum and rounding, of groups, modules and expressions."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress
from cases import CASES, groups_of
from compress import BudgetError
from compress.budget.bounds import WidthBounds
from compress.budget.choose import choose_widths, smallest_fractions
from compress.formatting import format_percent
from compress.graph import Groups
from compress.recipe import Bound, Budget, Target
from helpers.widths import BUDGET_CASES, random_importance, widths_of


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
@pytest.mark.parametrize("name", BUDGET_CASES)
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
                WidthBounds.of(groups, target)
            continue
        bounds, importance = WidthBounds.of(groups, target), random_importance(groups, seed)
        assert [*zip(bounds.least, bounds.most, strict=True)] == [(row[0], row[-1]) for row in table]
        limit = int(random.integers(int(measure(bounds.least)), whole + 1))
        kept = widths_of(groups, choose_widths(groups, importance, Budget(**{unit: 0.5}), target, limits={unit: limit}))
        assert kept.tolist() == bounded_greedy(groups, importance, limit, unit, table), target
        tried, cut = tried + 1, cut + (int(measure(kept)) < whole)
    assert tried >= 10 and cut >= tried // 2


def test_explicit_bounds_go_before_min_keep() -> None:
    groups = groups_of("chain")
    name, full = groups.cost.names[1], int(groups.cost.widths[1])
    spans = [({"least": 1}, 1, full), ({"most": 2}, 2, 2), ({"most": "1%"}, 1, 1), ({"least": 1.0}, full, full)]
    for given, least, most in [*spans, ({"most": full + 5}, 3, full)]:
        found = WidthBounds.of(groups, Target(min_keep=3, bounds={name: Bound(**given)}))
        assert (found.least[1], found.most[1]) == (least, most)
        assert (found.least[0], found.most[0]) == (3, groups.cost.widths[0])


def test_parts_of_a_width_are_not_rounded_across_a_whole_number() -> None:
    """29 % of 100 are 29 and 7 % are 7, whatever the products are in floating point."""
    groups = compress.find_groups(nn.Sequential(nn.Linear(3, 100), nn.ReLU(), nn.Linear(100, 2)), torch.randn(2, 3))
    for part in range(1, 101):
        found = WidthBounds.of(groups, Target(bounds={"0": Bound(least=f"{part}%", most=f"{part}%")}))
        assert found.least.tolist() == found.most.tolist() == [part]


def test_bounds_refer_to_the_dense_width_in_later_rounds() -> None:
    groups = groups_of("chain")
    name, width = groups.cost.names[1], int(groups.cost.widths[1])
    half, most = Target(bounds={name: Bound(least=0.5)}), Target(bounds={name: Bound(most=0.25)})
    assert WidthBounds.of(groups, half).least[1] == -(-width // 2)
    assert WidthBounds.of(groups, half, {name: 2 * width - 2}).least[1] == width - 1
    assert WidthBounds.of(groups, half, {name: 4 * width}).least[1] == width  # what is gone is gone
    assert WidthBounds.of(groups, most, {name: 2 * width}).most[1] == width // 2
    assert WidthBounds.of(groups, Target(bounds={"gone": Bound(least=3)}), {"gone": 9}).least.tolist() == [2, 2, 2]
    kept = choose_widths(groups, random_importance(groups), Budget(macs=1.0), most, dense_widths={name: 2 * width})
    assert len(kept[name]) == width // 2


def test_bounds_are_for_groups_modules_and_expressions_and_the_last_counts() -> None:
    groups = groups_of("residual_stream")
    names, dense = groups.cost.names, {g.name: g.width for g in groups}
    written = [(g.name, s.tensor.rpartition(".")[0]) for g in groups for s in g.output_slots]
    stream, alias = next((group, module) for group, module in written if module not in names)

    def most(**bounds: Any) -> dict[str, int]:
        return dict(zip(names, WidthBounds.of(groups, Target(bounds=bounds)).most.tolist(), strict=True))

    assert most(**{names[0]: Bound(most=3)}) == dense | {names[0]: 3}
    assert most(**{alias: Bound(most=3)})[stream] == 3
    assert most(**{"re:.*": Bound(most=3)}) == dict.fromkeys(names, 3)
    assert most(**{"re:.*": Bound(most=3), names[0]: Bound(most=4)}) == dict.fromkeys(names, 3) | {names[0]: 4}
    assert most(**{names[0]: Bound(most=4), "re:.*": Bound(most=3)}) == dict.fromkeys(names, 3)
    assert most(**{names[0]: Bound(most=4), "re:.*": Bound(least=3)}) == dense
    inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    groups = compress.find_groups(nn.Sequential(inner, nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(2, 4))
    assert groups.cost.names == ("0.0", "0.2", "1")
    assert WidthBounds.of(groups, Target(bounds={"0": Bound(most=5)})).most.tolist() == [5, 5, 6]


def test_bound_without_a_group_is_named() -> None:
    groups = groups_of("chain")
    first = groups.cost.names[0]
    nearest = rf"'{re.escape(first)}x' matches no group; the nearest names are .*\b{re.escape(first)}\b"
    with pytest.raises(ValueError, match=rf"target\.bounds: {nearest}.*\. Give the full name"):
        choose_widths(groups, random_importance(groups), Budget(macs=0.5), Target(bounds={f"{first}x": Bound(least=2)}))
    refused = next(g for g in map(groups_of, CASES) if g.refused)
    name, reason = refused.refused[0].name, refused.refused[0].explanation
    with pytest.raises(ValueError, match=re.escape(f"matches no group; {name} is not cut: {reason}. Give")):
        WidthBounds.of(refused, Target(bounds={f"re:{re.escape(name)}": Bound(least=2)}))


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
            WidthBounds.of(groups, Target(round_to=round_to, bounds={"1.0": bound}))


def test_bounds_and_roundings_that_stand_in_the_way_are_named() -> None:
    groups = groups_of("chain")
    free = format_percent(smallest_fractions(groups, Budget(macs=0.5), Target())["macs"])
    for name, value in (("bounds", {"re:.*": Bound(least="90%")}), ("round_to", 1000)):
        match = rf"Without target\.{name} it would be {free}\. .* lower target\.{name}\."
        with pytest.raises(BudgetError, match=match):
            choose_widths(groups, random_importance(groups), Budget(macs=0.5), Target(**{name: value}))
    with pytest.raises(BudgetError, match=r"refused\)\. Raise the budget, .* lower target\.min_keep\."):
        choose_widths(groups, random_importance(groups), Budget(macs=0.01), Target(bounds={"re:.*": Bound(least=2)}))


def test_limit_goes_before_the_budget() -> None:
    groups = groups_of("chain")
    importance, whole = random_importance(groups), int(groups.cost.params(groups.cost.widths))
    for left in (0.4, 0.7, 1.0):
        by_budget = choose_widths(groups, importance, Budget(params=left), Target())
        by_limit = choose_widths(groups, importance, Budget(params=0.5), Target(), limits={"params": left * whole})
        assert all(by_budget[n].tolist() == by_limit[n].tolist() for n in by_budget)
    least = int(groups.cost.params(WidthBounds.of(groups, Target()).least))
    with pytest.raises(BudgetError, match=rf"budget\.params: {least - 1} cannot be reached; .* that can is {least} \("):
        choose_widths(groups, importance, Budget(params=0.5), Target(), limits={"params": least - 1})


def test_group_that_is_cut_already_gets_a_multiple_unless_too_little_is_left() -> None:
    name = next(iter(BUDGET_CASES))
    groups = groups_of(name)
    widths = groups.cost.widths
    for round_to in (2, 3, 4):
        target = Target(round_to=round_to, min_keep=1)
        dense = {n: int(w) + 1 for n, w in zip(groups.cost.names, widths, strict=True)}
        bounds = WidthBounds.of(groups, target, dense)
        expected = [max((w for w in range(1, n + 1) if w % round_to == 0), default=n) for n in widths.tolist()]
        assert bounds.most.tolist() == expected
        assert WidthBounds.of(groups, target).most.tolist() == widths.tolist(), "a dense group may stay whole"
        assert (bounds.least <= bounds.most).all()


def test_automatic_steps_follow_the_dense_width_and_put_no_budget_out_of_reach() -> None:
    sizes = [8, 15, 16, 40, 64, 200]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise([4, *sizes, 3])]
    groups = compress.find_groups(nn.Sequential(*layers), torch.zeros(2, 4))
    bounds = WidthBounds.of(groups, Target())
    assert bounds.multiple.tolist() == [1, 1, 2, 4, 8, 8] and bounds.least.tolist() == [2] * 6
    assert bounds.round_up(np.array([3, 3, 3, 3, 3, 2])).tolist() == [3, 3, 4, 4, 8, 2]
    for left in (0.02, 0.1, 0.35, 0.8):
        budget = Budget(macs=left)
        kept = widths_of(groups, choose_widths(groups, random_importance(groups), budget, Target()))
        allowed = left * int(groups.cost.macs(groups.cost.widths))
        assert int(groups.cost.macs(kept)) <= allowed
        steps = dict(zip(kept.tolist(), bounds.multiple.tolist(), strict=True))
        assert all(width % step == 0 or width in (2, *sizes) for width, step in steps.items()), kept
        for i in np.flatnonzero(kept < groups.cost.widths):
            wider = kept.copy()
            wider[i] = min((kept[i] // bounds.multiple[i] + 1) * bounds.multiple[i], sizes[i])
            assert int(groups.cost.macs(wider)) > allowed
    cut_before = {name: 2 * width for name, width in zip(groups.cost.names, sizes, strict=True)}
    assert WidthBounds.of(groups, Target(), cut_before).multiple.tolist() == [2, 2, 4, 8, 8, 8]
    bounded = Target(bounds={groups.cost.names[5]: Bound(least=3, most=5)})
    assert WidthBounds.of(groups, bounded).multiple[5] == 1
