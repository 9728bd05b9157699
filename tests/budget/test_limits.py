"""A budget of several limits: all hold, the tight one is named, and an absolute one means what it says."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import compress
from cases import CASES, build, groups_of, random_keep
from compress import BudgetError, Plan
from compress.budget import smallest_fractions
from compress.budget.choose import choose_widths
from compress.budget.latency import choose_by_latency
from compress.budget.limits import check_asks_for_less, dense_costs, remaining_fractions
from compress.budget.timing import LatencyMeasurement
from compress.graph import weights_file_bytes
from compress.graph.costs import Cost
from compress.recipe import Budget, Recipe, Target, Timing
from compress.surgery import save_model
from helpers.digits import SEARCH, TIMING, dense, loaders
from helpers.virtual_clock import VirtualClock, timed_network
from helpers.widths import BUDGET_CASES, random_importance, widths_of


def cost(groups: compress.graph.Groups, unit: str, widths: np.ndarray) -> int:
    return int(getattr(Cost, unit)(groups.cost, widths))


@pytest.mark.parametrize("name", BUDGET_CASES)
def test_all_limits_hold_and_no_group_could_be_wider(name: str) -> None:
    groups, full = groups_of(name), groups_of(name).cost.widths
    tight = set()
    for macs, params, size, seed in itertools.product((0.4, 0.7), (0.35, 0.6, 0.9), (0.5, 0.8), range(2)):
        budget = Budget(macs=macs, params=params, size=size)
        if any(
            least > left
            for least, left in zip(
                smallest_fractions(groups, budget, Target()).values(), budget.limits.values(), strict=True
            )
        ):
            continue
        kept = widths_of(groups, choose_widths(groups, random_importance(groups, seed), budget, Target()))
        allowed = {unit: left * cost(groups, unit, full) * (1 + 1e-12) for unit, left in budget.limits.items()}
        assert all(cost(groups, unit, kept) <= allowed[unit] for unit in allowed)
        for i in np.flatnonzero(kept < full):
            wider = kept + np.eye(len(kept), dtype=int)[i]
            assert any(cost(groups, unit, wider) > allowed[unit] for unit in allowed), f"{groups.cost.names[i]}"
        tight.add(max(allowed, key=lambda unit: cost(groups, unit, kept) / allowed[unit]))
    assert len(tight) > 1, "each of several limits is the tight one somewhere"


def test_choice_is_that_of_brute_force_on_a_tiny_case() -> None:
    """The longest head of the ranking that fits every limit, then the best next dimensions that still fit."""
    groups = groups_of("chain")
    names, full = groups.cost.names, groups.cost.widths
    for seed, (macs, params) in itertools.product(range(4), ((0.4, 0.6), (0.7, 0.3), (0.5, 0.5))):
        importance = random_importance(groups, seed)
        allowed = {"macs": macs * cost(groups, "macs", full), "params": params * cost(groups, "params", full)}

        def fits(widths: list[int], allowed: dict[str, float] = allowed) -> bool:
            return all(cost(groups, unit, np.array(widths)) <= limit * (1 + 1e-12) for unit, limit in allowed.items())

        ranking = sorted((-v, i) for i, name in enumerate(names) for v in importance[name])
        widths = [0] * len(names)
        for _, i in ranking:  # in floating point no two values are equal
            longer = [w + (i == j) for j, w in enumerate(widths)]
            if not fits([max(1, w) for w in longer]):
                break
            widths = longer
        widths = [max(1, w) for w in widths]
        next_value = {i: np.sort(-importance[names[i]])[w] for i, w in enumerate(widths) if w < full[i]}
        for i in sorted(next_value, key=next_value.__getitem__):
            while widths[i] < full[i] and fits([w + (i == j) for j, w in enumerate(widths)]):
                widths[i] += 1
        budget = Budget(macs=macs, params=params)
        found = widths_of(groups, choose_widths(groups, importance, budget, Target(min_keep=1)))
        assert found.tolist() == widths


def test_loose_limit_changes_nothing() -> None:
    groups = groups_of("residual_stream_with_projection")
    importance = random_importance(groups)
    alone = choose_widths(groups, importance, Budget(macs=0.5), Target())
    both = choose_widths(groups, importance, Budget(macs=0.5, params=1.0, dims=1.0), Target())
    assert {n: k.tolist() for n, k in alone.items()} == {n: k.tolist() for n, k in both.items()}


@pytest.mark.parametrize("unit", ["macs", "params", "dims", "size"])
def test_absolute_limit_is_the_fraction_that_it_makes_up(unit: str) -> None:
    layers = [nn.Linear(8, 150), nn.ReLU(), nn.Linear(150, 90), nn.ReLU(), nn.Linear(90, 4)]
    groups = compress.find_groups(nn.Sequential(*layers), torch.zeros(2, 8))
    importance, whole = random_importance(groups), cost(groups, unit, groups.cost.widths)
    amount = int(0.6 * whole)
    absolute = Recipe.load({"budget": {unit: f"{amount} B" if unit == "size" else amount}}).budget
    by_amount = choose_widths(groups, importance, absolute, Target())
    by_fraction = choose_widths(groups, importance, Budget(**{unit: amount / whole}), Target())
    assert cost(groups, unit, widths_of(groups, by_amount)) <= amount
    assert {n: k.tolist() for n, k in by_amount.items()} == {n: k.tolist() for n, k in by_fraction.items()}


def test_smallest_reachable_of_each_limit_is_named() -> None:
    groups = groups_of("residual_stream")
    importance = random_importance(groups)
    with pytest.raises(
        BudgetError,
        match=r"budget: macs 1% of the dense network and size 100 B \(the dense network has [\d.]+ kB\) cannot be "
        r"reached; the smallest that can: macs [\d.]+%, params [\d.]+%, size [\d.]+ kB \(3 groups",
    ) as caught:
        budget = Recipe.load({"budget": {"macs": "1%", "params": "90%", "size": "100 B"}}).budget
        choose_widths(groups, importance, budget, Target())
    macs, params, size = str(caught.value).partition("that can: ")[2].partition(" (")[0].split(", ")
    reachable = {"macs": macs.split()[1], "params": params.split()[1], "size": size.removeprefix("size ")}
    choose_widths(groups, importance, Recipe.load({"budget": reachable}).budget, Target())


def test_absolute_budget_above_the_dense_network_is_an_error_unless_another_limit_cuts() -> None:
    groups = groups_of("chain")
    loose = Recipe.load({"budget": {"macs": "20G"}}).budget
    with pytest.raises(BudgetError, match=r"budget\.macs: 20G; the dense network has .*, so there is nothing to prune"):
        check_asks_for_less(loose, dense_costs(groups, loose))
    both = Recipe.load({"budget": {"macs": "20G", "params": "50%"}}).budget
    check_asks_for_less(both, dense_costs(groups, both))
    assert remaining_fractions(both, dense_costs(groups, both)) == {"macs": 1.0, "params": 0.5}


@pytest.mark.parametrize("name", ["chain", "residual_stream_with_projection", "dense_connections"])
def test_size_is_that_of_the_saved_file(name: str, tmp_path: Path) -> None:
    case, groups = CASES[name], groups_of(name)
    for number, fraction in enumerate((1.0, 0.6, 0.3)):
        model, keep = build(case), random_keep(groups, fraction)
        plan = Plan.build(model, groups, keep)
        plan.apply_(model)
        folder = tmp_path / str(number)
        folder.mkdir()
        save_model(model, plan, folder)
        actual, tensors = (folder / "model.safetensors").stat().st_size, len(model.state_dict())
        for computed in (cost(groups, "size", widths_of(groups, keep)), weights_file_bytes(model)):
            assert actual <= computed <= actual + 16 * tensors + 8


def test_latency_and_computed_limits_hold_together() -> None:
    """Time is in proportion to the dimensions: 64 dimensions take 64 units."""
    clock, x = VirtualClock(), torch.randn(2, 8)
    model = timed_network(clock)
    groups = compress.find_groups(model, x)
    importance, measurement = random_importance(groups), LatencyMeasurement(x, Timing(repeats=10), None, clock)
    for latency, params in ((0.5, 0.9), (0.9, 0.4), (0.6, 0.6)):
        budget = Budget(latency=latency, params=params)
        keep, notes = choose_by_latency(model, groups, importance, budget, Target(min_keep=1), measurement)
        kept = widths_of(groups, keep)
        assert kept.sum() <= 64 * latency
        allowed = params * cost(groups, "params", groups.cost.widths)
        assert cost(groups, "params", kept) <= allowed
        tight = kept.sum() == int(64 * latency) or all(
            cost(groups, "params", kept + row) > allowed for row in np.eye(2, dtype=int)
        )
        assert tight and len(notes) == 1 and notes[0].startswith("latency ")


def test_absolute_latency_is_compared_with_the_measured_time_of_the_dense_network() -> None:
    clock, x = VirtualClock(), torch.randn(2, 8)
    model = timed_network(clock)  # 64 dimensions of 20 microseconds
    groups = compress.find_groups(model, x)
    measurement = LatencyMeasurement(x, Timing(repeats=10), None, clock)
    budget = Recipe.load({"budget": {"latency": "0.64 ms"}}).budget
    keep, _ = choose_by_latency(model, groups, random_importance(groups), budget, Target(), measurement)
    assert widths_of(groups, keep).sum() == 32


@pytest.mark.parametrize("search", [{"method": "magnitude"}, SEARCH])
def test_run_with_several_limits_and_rounds_meets_all_and_names_the_tight_one(search: dict[str, object]) -> None:
    model, (train, val) = dense(), loaders()
    whole = compress.preview(model, {"budget": "50%"}, example_inputs=torch.zeros(1, 1, 8, 8)).report.dense
    for steps in (1, 2):
        recipe = {
            "budget": {"macs": "60%", "params": int(0.45 * whole.params), "dims": "70%", "size": "80%"},
            "search": search,
            "steps": steps,
            "timing": TIMING,
        }
        pruned = compress.prune(model, recipe, train=train, val=val, quiet=True)
        report = pruned.report
        assert report.pruned.macs <= 0.6 * report.dense.macs and report.pruned.params <= 0.45 * report.dense.params
        assert sum(map(len, pruned.plan.keep.values())) <= 0.7 * sum(pruned.plan.widths.values())
        assert report.pruned.size_bytes <= 0.8 * report.dense.size_bytes
        (note,) = [note for note in report.notes if note.startswith("budget: ")]
        parts = re.findall(r"(\w+) ([\d.]+)% \(limit ([\d.]+)(%?)\)", note)
        used = {u: float(left) / (float(limit) if sign else 45) for u, left, limit, sign in parts}
        assert set(used) == {"macs", "params", "dims", "size"} and max(used.values()) <= 1.001
        assert note.startswith(f"budget: {max(used, key=used.__getitem__)} is the tight limit; left are macs ")


def test_session_meets_several_limits() -> None:
    train, _ = loaders(count=128)
    recipe = {"budget": {"macs": "60%", "params": "50%"}, "search": {**SEARCH, "epochs": "4 steps"}, "timing": TIMING}
    session = compress.search_session(dense(), recipe, train=train)
    for _, batch in zip(range(session.steps), train, strict=False):
        session.step(batch)
    report = session.finish().report
    assert report.pruned.macs <= 0.6 * report.dense.macs and report.pruned.params <= 0.5 * report.dense.params


def test_preview_names_the_smallest_of_each_limit_and_the_tight_one() -> None:
    model = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 4))
    seen = compress.preview(model, {"budget": {"macs": "60%", "params": "40%"}}, example_inputs=torch.zeros(1, 8))
    assert seen.reachable and set(seen.smallest) == {"macs", "params"}
    assert "budget: macs 60%, params 40% can be met; the smallest reachable is macs " in seen.message
    assert any(note.startswith("budget: params is the tight limit") for note in seen.report.notes)
    missed = compress.preview(model, {"budget": {"macs": "1%", "params": "40%"}}, example_inputs=torch.zeros(1, 8))
    assert not missed.reachable and "budget: macs 1% of the dense network cannot be reached" in missed.message
    loose = compress.preview(model, {"budget": {"macs": "20G"}}, example_inputs=torch.zeros(1, 8))
    assert not loose.reachable and "so there is nothing to prune" in loose.message
