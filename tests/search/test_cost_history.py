"""The history of costs: recorded at even distances, resumed to the same bits, and its changes of sign."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.search import CostHistory, score_history
from compress.search.cost_history import CostSample, LossAndEntropy, sign_changes, smoothed
from helpers.choice_networks import conv_choices, images
from helpers.digits import loaders
from helpers.interruption import Interrupted, InterruptedLoader, save_at_every_step


def history(costs: list[float], pull: float = 1.0) -> CostHistory:
    steps = [10 * (i + 1) for i in range(len(costs))]
    return CostHistory(
        "search",
        "all",
        steps,
        {"a": costs, "b": [0.0] * len(costs)},
        {"a": [pull] * len(costs), "b": [pull] * len(costs)},
    )


def test_sign_changes_skip_zeros() -> None:
    assert sign_changes([1, 2, 3, 4, 5, 6], [1, 0, -1, -1, 0, 1]) == [3, 6]
    assert sign_changes([1, 2, 3], [0, 0, 1]) == sign_changes([], []) == []


def test_sign_of_a_group_is_zero_where_its_dimensions_cancel() -> None:
    """The dimensions add up to 2 * pull - cost without their signs: 0.01 of the largest of these is the limit."""
    assert history([0.5, 0.0198, -0.0198, -0.5], pull=1.0).signs("a") == [1, 0, 0, -1]
    assert history([0.5, 0.03, -0.03, -0.5], pull=1.0).signs("a") == [1, 1, -1, -1]
    assert history([0.5, 0.01, -0.02, -0.5]).sign_changes("a") == [40]
    assert history([0.5, -0.5]).last_group == "a" and history([1e-9, -1e-9]).last_group is None


def test_a_noisy_cost_changes_its_sign_once() -> None:
    """From 1 to -1 over 100 records, with noise: the mean over a tenth around each crosses zero once, in the middle."""
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0)) * 0.1
    costs = (torch.linspace(1, -1, 100) + noise).tolist()
    raw = sign_changes([10 * (i + 1) for i in range(100)], [1 if cost > 0 else -1 for cost in costs])
    (change,) = history(costs).sign_changes("a")
    assert len(raw) > 1 and 400 <= change <= 600
    assert smoothed([1.0, 2.0, 4.0]) == [1.0, 2.0, 4.0]
    assert smoothed([float(i) for i in range(40)])[0] == 1.0  # of the first three, with none before


def test_history_survives_json_and_has_gaps_where_nothing_was_measured() -> None:
    original = CostHistory("search", "primary")
    known = {"all": LossAndEntropy(1.0, 2.0, 1.5), "right": LossAndEntropy(0.25, 1.5, 1.25), "wrong": None}
    for step, samples in ((3, {}), (4, known), (5, {})):  # every target of a step may be ignored
        original.append(step, CostSample({"a": 0.125}, {"a": 0.5}, {"a": {"conv": 1 / 3}}, samples))
    again = CostHistory.from_dict(json.loads(json.dumps(original.to_dict())))
    assert again == original
    assert again.costs == {"a": [0.125] * 3} and again.candidates == {"a": {"conv": [0.333333] * 3}}
    assert again.samples["all"].difference == [None, 0.5, None]
    assert again.samples["wrong"].difference == [None] * 3 and again.samples["right"].share == [None, 0.25, None]
    assert again.total == [0.125] * 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


RECIPE: dict[str, Any] = {"budget": {"macs": "50%"}, "timing": {"repeats": 3}}


def test_a_long_search_records_about_a_hundred_means_and_its_last_step() -> None:
    recipe = RECIPE | {"search": {"method": "netslim", "epochs": "203 steps", "lr": 1e-3}}
    (found,) = compress.prune(network(), recipe, train=loaders(batch=16, count=64)[0], quiet=True).report.costs
    assert found.steps == [*range(2, 203, 2), 203]
    assert (found.stage, found.half) == ("search", "all")


def test_two_rounds_are_two_searches() -> None:
    recipe = RECIPE | {"search": {"method": "rarts", "epochs": "6 steps", "lr": 1e-3}, "steps": 2}
    report = compress.prune(network(), recipe, train=loaders(batch=16, count=64)[0], quiet=True).report
    found = [(costs.stage, costs.half, costs.steps) for costs in report.costs]
    halves = "auxiliary", "primary"
    assert found == [(f"search {n}", half, [1, 2, 3]) for n in (1, 2) for half in halves]
    assert compress.Report.from_dict(json.loads(report.to_json())).costs == report.costs


@pytest.mark.parametrize("key", [{"costs": False}, {"method": "taylor"}, {"method": "aps"}])
def test_searches_without_costs_have_none_in_the_report(key: dict[str, Any]) -> None:
    recipe = RECIPE | {"search": {"method": "netslim", "epochs": "4 steps"} | key}
    assert compress.prune(network(), recipe, train=loaders(batch=16, count=64)[0], quiet=True).report.costs == []


def test_an_older_report_has_no_costs(tmp_path: Path) -> None:
    recipe = {**RECIPE, "search": "magnitude"}
    data = json.loads(
        compress.prune(network(), recipe, example_inputs=torch.zeros(1, 1, 8, 8), quiet=True).report.to_json()
    )
    assert data.pop("costs") == []
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert compress.Report.load(tmp_path / "report.json").costs == []


@pytest.mark.parametrize("operations", [False, True])
def test_a_search_that_was_stopped_between_two_records_has_the_same_costs(
    operations: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score_history, "COST_RECORDS", 2)  # every third of the six steps
    save_at_every_step(monkeypatch)
    recipe = {"target": {"operations": True}, "timing": {"repeats": 3}} if operations else RECIPE
    recipe = recipe | {"search": {"method": "rarts", "epochs": "6 steps", "lr": 0.02}}

    def prune(after: int, **settings: Any) -> compress.Pruned:
        model, loader = network(), loaders(batch=16, count=192)[0]
        if operations:
            x, y = (torch.cat(part) for part in zip(*images(count=192), strict=True))
            model, loader = conv_choices(), DataLoader(TensorDataset(x, y), 16, shuffle=True)
        return compress.prune(model, recipe, train=InterruptedLoader(loader, after), quiet=True, **settings)

    whole = prune(-1).report.costs
    assert [costs.half for costs in whole] == ["auxiliary", "primary"]
    assert all(costs.steps == [3, 6] for costs in whole)
    with pytest.raises(Interrupted):
        prune(9, workdir=tmp_path)  # one batch for the example inputs, then two in each step
    assert prune(-1, workdir=tmp_path, resume=True).report.costs == whole


def test_session_returns_the_costs_so_far() -> None:
    batches = list(loaders(batch=16, count=64)[0])
    recipe = RECIPE | {"search": {"method": "darts1", "lr": 0.01}}
    session = compress.search_session(network(), recipe, train=batches, steps=4)
    assert session.costs() == []
    for n in range(3):
        session.step((batches[n], batches[n + 1]))
    auxiliary, primary = session.costs()
    assert (auxiliary.half, primary.half) == ("auxiliary", "primary")
    assert auxiliary.steps == [1] and primary.steps == [1, 2, 3]  # the scores are not trained on the auxiliary half
    assert list(primary.costs) == [group.name for group in session.groups]
    primary.steps.clear()
    assert session.costs()[1].steps == [1, 2, 3]
