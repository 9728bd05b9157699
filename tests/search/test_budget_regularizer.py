"""The budget regularizer: scores of dimensions that will be dropped are zero when the search ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import compress
from compress.budget import dense_costs
from compress.data.split_halves import split_into_halves
from helpers.bilevel import TWO_BATCH_METHODS, batch_pair, started_search
from helpers.regression import with_useless_features


@pytest.mark.parametrize("unit", ["macs", "params", "dims"])
@pytest.mark.parametrize("method", [*TWO_BATCH_METHODS, "netslim"])
def test_what_is_cut_is_at_zero_when_the_search_ends(method: str, unit: str, round_to: int = 1) -> None:
    """With gamma: auto the cut changes nothing that the scored network computes."""
    from compress.pipeline import Run, UserInputs, finish_search, start_search
    from compress.progress import ProgressDisplay
    from compress.training.engine import Engine
    from helpers.digits import dense, loaders

    recipe = compress.Recipe.load(
        {
            "budget": {unit: "60%"},
            "search": {"method": method, "epochs": "40 steps", "lr": 0.02},
            "target": {"round_to": round_to, "min_keep": round_to},
        }
    )
    train = loaders(count=512)[0]
    run = Run(dense(), recipe, Engine(torch.device("cpu"), 0, ProgressDisplay(quiet=True)), UserInputs(train))
    groups = run.find_groups()
    search: Any = start_search(run, groups)
    run.compact.train()
    batches: Any = split_into_halves(train, 0) if search.batches_per_step == 2 else train
    for one in [one for _ in range(10) for one in batches][:40]:
        search.step(one)
    run.compact.eval()
    x = torch.randn(8, 1, 8, 8)
    with torch.no_grad():
        scored = run.compact(x)
    alpha = {name: a.detach().clone() for name, a in search.regularizer.scores.items()}
    result = finish_search(run, search)
    plan = run.choose_plan(groups, result)
    for name, a in alpha.items():
        dropped = torch.ones(len(a), dtype=torch.bool)
        dropped[torch.as_tensor(plan.keep[name])] = False
        assert dropped.any() or len(a) == len(plan.keep[name])
        assert (a[dropped] == 0).all(), name
    run.cut_(groups, plan, result)
    with torch.no_grad():
        assert torch.allclose(run.compact(x), scored, atol=1e-4)


@pytest.mark.parametrize("unit", ["macs", "dims"])
@pytest.mark.parametrize("round_to", [4, 8])
def test_what_is_cut_is_at_zero_where_widths_are_rounded(round_to: int, unit: str) -> None:
    test_what_is_cut_is_at_zero_when_the_search_ends("netslim", unit, round_to)


@pytest.mark.parametrize("unit", ["macs", "dims", "latency"])
def test_rounds_of_search_end_at_zero_each(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds with rounded widths: each cut leaves the function as it is. A latency is what was measured midway."""
    from compress.pipeline import Run, UserInputs
    from compress.progress import ProgressDisplay
    from compress.training.engine import Engine
    from helpers.digits import dense, loaders

    train = loaders(count=512)[0]
    recipe = compress.Recipe.load(
        {
            "budget": {unit: "50%"},
            "search": {"method": "netslim", "epochs": "40 steps", "lr": 0.02},
            "target": {"round_to": 2},
            "timing": {"repeats": 3, "batch_size": 64},
            "steps": 2 if unit != "latency" else 1,
        }
    )
    run = Run(dense(), recipe, Engine(torch.device("cpu"), 0, ProgressDisplay(quiet=True)), UserInputs(train))
    run.find_groups = lambda: compress.find_groups(run.compact, run.example_inputs, recipe.target)  # type: ignore
    run.engine.run_state.dense_costs = dense_costs(run.find_groups(), recipe.budget)
    x = torch.randn(8, 1, 8, 8)
    if unit == "latency":

        def half(model: Any, groups: Any, importance: Any, *_: Any, **__: Any) -> Any:
            best = {name: value.argsort(descending=True) for name, value in importance.items()}
            return {name: order[: len(order) // 2].sort().values.numpy() for name, order in best.items()}, []

        monkeypatch.setattr("compress.budget.pruning_schedule.choose_by_latency", half)
        monkeypatch.setattr(
            "compress.budget.pruning_schedule.measure_dimension_times",
            lambda model, groups, measurement: {g.name: 0.01 for g in groups},
        )
    while run.round_index < recipe.steps:
        groups = run.find_groups()
        result = run.search(groups)
        with torch.no_grad():
            scored = run.compact(x)
        run.cut_(groups, run.choose_plan(groups, result), result)
        with torch.no_grad():
            assert torch.allclose(run.compact(x), scored, atol=1e-4)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("method", [*TWO_BATCH_METHODS, "netslim"])
def test_budget_regularizer_drops_the_planted_useless_channels(method: str, seed: int) -> None:
    model, data, useless = with_useless_features(False, seed)
    search = {"method": method, "epochs": 12, "lr": 0.1}
    full = {"budget": {"dims": "75%"}, "search": search, "timing": {"repeats": 3}, "seed": seed}
    pruned = compress.prune(model, full, train=data, quiet=True)
    assert set(range(12)) - set(pruned.plan.keep["0"]) == useless


def pulled(alpha: list[float], saliency: list[float], norms: list[float]) -> list[float]:
    """The importance of eight dimensions with the given scores, saliency and column norms."""
    from compress.search.base import Job
    from compress.search.score_training.budget_regularizer import BudgetRegularizer
    from compress.surgery.gates import attach_

    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        columns = model[2].weight
        columns.copy_(torch.randn_like(columns))
        columns.mul_(torch.tensor(norms) / columns.norm(dim=0))
    groups = compress.find_groups(model, torch.randn(1, 3))
    scores = attach_(model, groups)
    regularizer = BudgetRegularizer(scores, Job(model, groups, compress.Classification(), 10))
    with torch.no_grad():
        scores["0"].copy_(torch.tensor(alpha))
    regularizer.saliency[0].copy_(torch.tensor(saliency))
    return regularizer.importance()["0"].tolist()


def test_a_group_drops_its_smallest_dimensions_as_many_as_have_low_saliency() -> None:
    """The values are those of saliency; the order by brute force: size^2 alpha^2 saliency^0.25, larger is better."""
    saliency, norms = [3.0, 1.0, 2.0, 5.0, 4.0, 6.0, 8.0, 7.0], [1.0, 5.0, 2.0, 0.5, 3.0, 0.1, 4.0, 0.2]
    alpha = [1.0, 0.5, -1.0, 1.0, 1.0, 2.0, 1.0, -3.0]
    found = pulled(alpha, saliency, norms)
    place = [n**2 * a**2 * w**0.25 for n, a, w in zip(norms, alpha, saliency, strict=True)]
    order = sorted(range(8), key=lambda i: -place[i])
    expected = dict(zip(order, sorted(saliency, reverse=True), strict=True))
    assert found == [expected[i] for i in range(8)]


def test_dimensions_without_saliency_are_dropped_first_however_large() -> None:
    """A channel that is always zero may have large columns; nobody would miss it."""
    found = pulled([1.0] * 8, [1.0] * 7 + [0.0], [1.0] * 7 + [100.0])
    assert found.index(min(found)) == 7


def test_what_is_at_zero_stays_below_all_that_is_not() -> None:
    found = pulled([0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [9.0] * 8, [9.0] + [0.0] * 7)
    assert [i for i, value in enumerate(found) if value == 0] == [0, 2]


def test_penalty_and_auto_do_not_go_together() -> None:
    with pytest.raises(compress.RecipeError, match="penalty: expected a number as gamma along with it"):
        compress.Recipe.load({"budget": {"macs": 0.5}, "search": {"method": "rarts", "epochs": 1, "penalty": "macs"}})
    search = started_search("darts1", gamma="auto")
    with pytest.raises(ValueError, match="gamma: auto follows from the budget, and there is none"):
        search.step(batch_pair())
