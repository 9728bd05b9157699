"""The scores that the report shows: their distribution during a search."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import compress
from cases import CASES, build, groups_of
from compress.search.base import Job, Search
from compress.search.score_history import LARGEST_GROUPS, SNAPSHOTS, record_scores, score_quantiles
from compress.training import Classification
from helpers.digits import dense, loaders

RECIPE = {"budget": {"macs": "50%"}, "timing": {"repeats": 3}}


def test_spread_is_that_of_sorted_scores() -> None:
    scores = {f"group{i}": torch.arange(10.0 * i, 10.0 * i + 11 + 10 * i) for i in range(LARGEST_GROUPS + 2)}
    found = score_quantiles(scores)
    assert [*found["groups"]] == [f"group{i}" for i in range(2, LARGEST_GROUPS + 2)]  # the widest
    assert found["groups"]["group2"] == [20 + 3 * i for i in range(11)]  # deciles of 20 .. 50
    every = sorted(value for score in scores.values() for value in score.tolist())
    assert found["all"][0] == every[0] and found["all"][-1] == every[-1]
    assert found["all"][10] == pytest.approx(np.median(every), rel=1e-3) and len(found["all"]) == 21


def test_scores_start_at_one_and_what_is_cut_ends_at_zero() -> None:
    recipe = RECIPE | {"search": {"method": "netslim", "epochs": f"{2 * SNAPSHOTS + 3} steps", "lr": 0.01}}
    report = compress.prune(dense(), recipe, train=loaders()[0], quiet=True).report
    steps = [moment["step"] for moment in report.scores]
    assert steps == [*range(0, 2 * SNAPSHOTS + 3, 2), 2 * SNAPSHOTS + 3]
    assert set(report.scores[0]["all"]) == {1.0}
    num_scores, num_zeros = (sum(row.width for row in report.groups), sum(r.width - r.kept for r in report.groups))
    position = np.linspace(0, 1, 21) * (num_scores - 1)  # quantiles interpolate between sorted scores
    assert [value == 0 for value in report.scores[-1]["all"]] == list(position <= num_zeros - 1)
    assert compress.Report.from_dict(json.loads(report.to_json())).scores == report.scores


def test_search_without_scores_has_none_to_show() -> None:
    recipe = RECIPE | {"search": {"method": "taylor", "epochs": "2 steps"}}
    assert compress.prune(dense(), recipe, train=loaders()[0], quiet=True).report.scores == []


@pytest.mark.parametrize("trains", [False, True])
def test_steps_run_in_eval_mode_unless_the_search_trains(trains: bool) -> None:
    modes_seen = []

    class Watching(Search):
        def step(self, batch: object) -> dict[str, torch.Tensor]:
            modes_seen.append({module.training for module in self.job.model.modules()})
            return {}

        def importance(self) -> dict[str, torch.Tensor]:
            return {}

    Watching.trains = trains
    name = next(iter(CASES))
    model = build(CASES[name]).train()
    step = record_scores(Watching(None, Job(model, groups_of(name), Classification(), 1)), "search", [])
    step(None)
    assert modes_seen == [{trains}]
    assert all(module.training for module in model.modules()), "the modes are restored"
