"""The scores that the report shows: their distribution during a search."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st

import compress
from cases import CASES, build, groups_of
from compress.search.base import Job, Search
from compress.search.score_history import SNAPSHOTS, record_scores, score_quantiles, spread_over_kinds
from compress.training import Classification
from helpers.digits import dense, loaders

RECIPE = {"budget": {"macs": "50%"}, "timing": {"repeats": 3}}


def test_spread_is_that_of_sorted_scores() -> None:
    scores = {f"group{i}": torch.arange(10.0 * i, 10.0 * i + 11 + 10 * i) for i in range(11)}
    found = score_quantiles(scores, ["group2", "group7", "of another network"])
    assert [*found["groups"]] == ["group2", "group7"]
    assert found["groups"]["group2"] == [20 + 3 * i for i in range(11)]  # deciles of 20 .. 50
    every = sorted(value for score in scores.values() for value in score.tolist())
    assert found["all"][0] == every[0] and found["all"][-1] == every[-1]
    assert found["all"][10] == pytest.approx(np.median(every), rel=1e-3) and len(found["all"]) == 21


def test_every_kind_is_shown_and_spread_over_the_depth() -> None:
    kinds = {"stem": "embedding"}
    for i in range(12):
        kinds |= {f"{i}.qk": "attention qk", f"{i}.v": "attention v", f"{i}.mlp": "mlp"}
    expected = ["stem", "0.qk", "0.v", "0.mlp", "5.qk", "11.qk", "11.v", "11.mlp", "5.v"]
    assert spread_over_kinds(kinds) == sorted(expected, key=[*kinds].index)  # shares: 1, 3, 3, 2
    assert spread_over_kinds(dict.fromkeys(map(str, range(150)), "channels"), 3) == ["0", "74", "149"]
    assert spread_over_kinds({str(i): f"kind {i % 20}" for i in range(60)}) == [str(i) for i in range(20, 29)]


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(1, 12))
def test_shown_groups_are_as_many_as_fit_and_their_kinds_as_even_as_they_can_be(order: list[int], count: int) -> None:
    kinds = {f"group{i}": str(kind) for i, kind in enumerate(order)}
    shown = spread_over_kinds(kinds, count)
    assert len(shown) == min(count, len(kinds)) and shown == [name for name in kinds if name in shown]
    shares, sizes = (Counter(map(kinds.__getitem__, names)) for names in (shown, kinds))
    largest = max(shares.values(), default=0)
    assert all(shares[kind] >= min(size, largest - 1) for kind, size in sizes.items())


def test_a_search_records_every_kind_of_group() -> None:
    model = timm.models.VisionTransformer(8, 4, num_classes=4, embed_dim=24, depth=5, num_heads=2)
    recipe = {
        "search": {"method": "netslim", "epochs": "1 steps", "lr": 0.01},
        "budget": {"macs": "70%"},
        "target": {"attention": ["qk", "v"], "mlp": True, "embedding": True},
    }
    report = compress.prune(model, recipe, train=[(torch.randn(4, 3, 8, 8), torch.arange(4))], quiet=True).report
    kinds = {row.name: row.kind_and_part for row in report.groups}
    assert len(kinds) > len(report.scores[0]["groups"]) == 9
    assert (
        {kinds[name] for name in report.scores[0]["groups"]} == set(kinds.values()) >= {"attention qk", "attention v"}
    )


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
