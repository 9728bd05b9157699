"""The pull that knows the budget: what will be cut is at zero when the search ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_bilevel import PAIRED, pair, started
from test_netslim import planted
from torch import nn

import compress
from compress.split import halves


@pytest.mark.parametrize("unit", ["macs", "params", "dims"])
@pytest.mark.parametrize("method", [*PAIRED, "netslim"])
def test_what_is_cut_is_at_zero_when_the_search_ends(method: str, unit: str, round_to: int = 1) -> None:
    """With gamma: auto the cut changes nothing that the scored network computes."""
    from digits import dense, loaders

    from compress.display import Display
    from compress.engine import Engine
    from compress.run import Run

    recipe = compress.Recipe.load(
        {
            "budget": {unit: "60%"},
            "search": {"method": method, "epochs": "40 steps", "lr": 0.02},
            "target": {"round_to": round_to, "min_keep": round_to},
        }
    )
    train = loaders(count=512)[0]
    run = Run(dense(), recipe, Engine(torch.device("cpu"), 0, Display(quiet=True)), train=train)
    groups = run.find()
    search: Any = run.begin_search(groups)
    run.compact.train()
    batches: Any = halves(train, 0) if search.reads == 2 else train
    for one in [one for _ in range(10) for one in batches][:40]:
        search.step(one)
    run.compact.eval()
    x = torch.randn(8, 1, 8, 8)
    with torch.no_grad():
        scored = run.compact(x)
    alpha = {name: a.detach().clone() for name, a in search.penalty.scores.items()}
    importance = run.end_search(search)
    keep = run.choose(groups, importance)
    for name, a in alpha.items():
        dropped = torch.ones(len(a), dtype=torch.bool)
        dropped[torch.as_tensor(keep[name])] = False
        assert dropped.any() or len(a) == len(keep[name])
        assert (a[dropped] == 0).all(), name
    run.cut(groups, keep)
    with torch.no_grad():
        assert torch.allclose(run.compact(x), scored, atol=1e-4)


@pytest.mark.parametrize("unit", ["macs", "dims"])
@pytest.mark.parametrize("round_to", [4, 8])
def test_what_is_cut_is_at_zero_where_widths_are_rounded(round_to: int, unit: str) -> None:
    test_what_is_cut_is_at_zero_when_the_search_ends("netslim", unit, round_to)


@pytest.mark.parametrize("unit", ["macs", "dims", "latency"])
def test_rounds_of_search_end_at_zero_each(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds with rounded widths: each cut leaves the function as it is. A latency is what was measured midway."""
    from digits import dense, loaders

    from compress.display import Display
    from compress.engine import Engine
    from compress.run import Run

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
    run = Run(dense(), recipe, Engine(torch.device("cpu"), 0, Display(quiet=True)), train=train)
    run.find = lambda: compress.find_groups(run.compact, run.ready.example_inputs, recipe.target)  # type: ignore
    x = torch.randn(8, 1, 8, 8)
    if unit == "latency":

        def half(model: Any, groups: Any, importance: Any, *_: Any, **__: Any) -> Any:
            best = {name: value.argsort(descending=True) for name, value in importance.items()}
            return {name: order[: len(order) // 2].sort().values.numpy() for name, order in best.items()}, []

        monkeypatch.setattr("compress.line.choose_by_latency", half)
        monkeypatch.setattr("compress.line.shares", lambda model, groups, *_, **__: {g.name: 0.01 for g in groups})
    while run.round < recipe.steps:
        groups = run.find()
        importance = run.search(groups)
        with torch.no_grad():
            scored = run.compact(x)
        run.cut(groups, run.choose(groups, importance))
        with torch.no_grad():
            assert torch.allclose(run.compact(x), scored, atol=1e-4)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("method", [*PAIRED, "netslim"])
def test_budget_pulls_the_planted_useless_channels(method: str, seed: int) -> None:
    model, data, useless = planted(False, seed)
    search = {"method": method, "epochs": 12, "lr": 0.1}
    full = {"budget": {"dims": "75%"}, "search": search, "timing": {"repeats": 3}, "seed": seed}
    pruned = compress.prune(model, full, train=data, quiet=True)
    assert set(range(12)) - set(pruned.plan.keep["0"]) == useless


def pulled(alpha: list[float], worth: list[float], norms: list[float]) -> list[float]:
    """The importance that the pull gives eight dimensions with such scores, worth and sizes of their columns."""
    from compress.gates import attach_
    from compress.search import Job
    from compress.search.pull import Pull

    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        columns = model[2].weight
        columns.copy_(torch.randn_like(columns))
        columns.mul_(torch.tensor(norms) / columns.norm(dim=0))
    groups = compress.find_groups(model, torch.randn(1, 3))
    scores = attach_(model, groups)
    pull = Pull(scores, Job(model, groups, compress.Classification(), 10))
    with torch.no_grad():
        scores["0"].copy_(torch.tensor(alpha))
    pull.worth[0].copy_(torch.tensor(worth))
    return pull.importance()["0"].tolist()


def test_a_group_loses_its_smallest_dimensions_as_many_as_are_worth_little() -> None:
    """The values are those of worth, brute force for the order: size^2 alpha^2 worth^0.25, the larger the better."""
    worth, norms = [3.0, 1.0, 2.0, 5.0, 4.0, 6.0, 8.0, 7.0], [1.0, 5.0, 2.0, 0.5, 3.0, 0.1, 4.0, 0.2]
    alpha = [1.0, 0.5, -1.0, 1.0, 1.0, 2.0, 1.0, -3.0]
    found = pulled(alpha, worth, norms)
    place = [n**2 * a**2 * w**0.25 for n, a, w in zip(norms, alpha, worth, strict=True)]
    order = sorted(range(8), key=lambda i: -place[i])
    expected = dict(zip(order, sorted(worth, reverse=True), strict=True))
    assert found == [expected[i] for i in range(8)]


def test_what_is_worth_nothing_goes_first_however_large() -> None:
    """A channel that is always zero may have large columns; nobody would miss it."""
    found = pulled([1.0] * 8, [1.0] * 7 + [0.0], [1.0] * 7 + [100.0])
    assert found.index(min(found)) == 7


def test_what_is_at_zero_stays_below_all_that_is_not() -> None:
    found = pulled([0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [9.0] * 8, [9.0] + [0.0] * 7)
    assert [i for i, value in enumerate(found) if value == 0] == [0, 2]


def test_penalty_and_auto_do_not_go_together() -> None:
    with pytest.raises(compress.RecipeError, match="penalty: expected a number as gamma along with it"):
        compress.Recipe.load({"budget": {"macs": 0.5}, "search": {"method": "rarts", "epochs": 1, "penalty": "macs"}})
    search = started("darts1", gamma="auto")
    with pytest.raises(ValueError, match="gamma: auto follows from the budget, and there is none"):
        search.step(pair())
