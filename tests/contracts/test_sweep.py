"""The sweep over known networks: its plans, its verdicts, and rows that survive a killed run."""

from __future__ import annotations

import copy
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

import compress
from benchmarks import sweep, sweep_checks, sweep_networks
from cases import CASES, build, example, groups_of
from compress.graph import Groups


def comparison(name: str, groups: Groups) -> sweep_checks.Comparison:
    return sweep_checks.Comparison(sweep_networks.Example(build(CASES[name]), example(CASES[name])), groups)


def test_random_plans_choose_each_width_on_its_own() -> None:
    groups = groups_of("chain")
    keeps = [sweep_checks.random_keep(groups, seed) for seed in range(200)]
    for group in groups:
        assert {len(keep[group.name]) for keep in keeps} == set(range(1, group.width + 1))
        assert all(len(np.unique(keep[group.name])) == len(keep[group.name]) for keep in keeps)
    first, second = groups.offered[:2]
    assert len({len(k[first.name]) / first.width - len(k[second.name]) / second.width for k in keeps}) > 10


def test_random_plans_keep_the_same_number_in_every_head() -> None:
    groups = groups_of("chain")
    groups = replace(groups, offered=[replace(groups.offered[0], num_heads=2)])
    width = groups.offered[0].width // 2
    for seed in range(20):
        kept = sweep_checks.random_keep(groups, seed)[groups.offered[0].name]
        assert (kept < width).sum() * 2 == len(kept)


def test_exact_plans_are_exact_and_change_the_outputs() -> None:
    groups = groups_of("chain")
    outcome = comparison("chain", groups).check(sweep_checks.random_keep(groups, 0))
    assert outcome.status == "exact" and outcome.effect > 0.01


def test_planted_wrong_group_is_the_cause() -> None:
    """A group whose reader is forgotten does not run, and is the only one that is blamed."""
    groups = groups_of("chain")
    wrong = groups.offered[1]
    broken = replace(wrong, slots=tuple(slot for slot in wrong.slots if not slot.gated))
    groups = replace(groups, offered=[broken if g is wrong else g for g in groups.offered])
    keep = {g.name: np.arange(g.width // 2) for g in groups}
    compared = comparison("chain", groups)
    assert compared.check(keep).status == "does not run"
    assert compared.reduce_failure(keep) == {wrong.name: f"{wrong.width // 2} of {wrong.width}"}


def test_passes_of_the_model_and_its_copies_are_counted() -> None:
    model, x = build(CASES["chain"]), example(CASES["chain"])
    with sweep_checks.count_passes(model) as passes:
        for net in (model, copy.deepcopy(model)):
            net(x)
        with pytest.raises(RuntimeError):
            model(x[:, :1])
        model.get_submodule("2")(x)  # a part of it: of another class
    model(x)
    assert passes == {"model": 3, "parts": 1}


def test_nan_on_one_side_is_a_difference() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")])
    assert sweep_checks.relative_difference([a], [b]) == float("inf")
    assert sweep_checks.relative_difference([b], [b]) == 0


def test_a_killed_sweep_loses_only_the_row_it_was_writing(tmp_path: Path) -> None:
    path = tmp_path / "results" / "sweep.jsonl"
    for status in ("differs", "exact"):
        sweep.append_row(path, {"network": "a", "target": "default", "status": status})
    with path.open("a") as file:
        file.write('{"network": "b", "tar')
    sweep.append_row(path, {"network": "c", "target": "default", "status": "exact"})
    assert [(row["network"], row["status"]) for row in sweep.read_rows(path)] == [("a", "exact"), ("c", "exact")]


def test_a_hang_is_one_row() -> None:
    rows = list(sweep.run_network("torchvision/resnet18", [], plans=1, time_limit=0.01))
    assert [(row["target"], row["status"]) for row in rows] == [("default", "hang")]


def test_a_missing_library_is_one_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "missing_library", lambda name: "timm")
    rows = list(sweep.run_network("timm/vgg11", [], plans=1, time_limit=1))
    assert [row["reason"] for row in rows] == ["timm is not installed"]
    assert sweep.summary([{"network": "timm/vgg11"} | rows[0]])["pairs"] == 0


def test_summary_counts_pairs_plans_and_failures() -> None:
    plans = {"plans": 4, "does_not_run": 0, "differs": 0, "forward_passes": 3, "seconds_find": 1.0}
    rows = [
        {"network": "a", "target": "default", "status": "exact", "macs_left": 0.5, "exact": 4} | plans,
        {"network": "a", "target": "all", "status": "absent"},
        {"network": "b", "target": "default", "status": "exact", "macs_left": 0.7, "exact": 4} | plans,
        {"network": "b", "target": "all", "status": "differs", "macs_left": 0.5, "exact": 1}
        | plans
        | {"differs": 3, "forward_passes": 12},
        {"network": "c", "target": "default", "status": "hang", "reason": "not finished after 300 s"},
    ]
    counts = sweep.summary(rows)
    assert (counts["networks"], counts["pairs"], counts["plans"], counts["exact"], counts["differs"]) == (
        3,
        4,
        12,
        9,
        3,
    )
    assert (counts["half_by_default"], counts["half_by_any_target"], counts["most_passes"]) == (1, 1, 12)
    assert [sweep.describe_failure(row) for row in rows] == [
        "",
        "",
        "",
        "half of the MACs: differs; 3 of 4 plans: differs; 12 forward passes",
        "hang: not finished after 300 s",
    ]


def test_a_cut_in_the_head_of_a_detector_is_seen() -> None:
    """The head runs behind a filter of boxes, so it is compared by its own outputs."""
    pytest.importorskip("torchvision")
    network = sweep_networks.build_example("torchvision/fasterrcnn_mobilenet_v3_large_320_fpn")
    groups = compress.find_groups(network.model, network.inputs)
    outcome = sweep_checks.Comparison(network, groups).check({"roi_heads.box_head.fc6": np.arange(8)})
    assert outcome.status == "exact" and 0.01 < outcome.effect < float("inf")


def test_every_module_of_timm_has_a_network() -> None:
    timm = pytest.importorskip("timm")
    if metadata.version("timm") != "1.0.31":
        pytest.skip("the table was made for timm 1.0.31")
    names = {name.partition(":")[0] for name in sweep_networks.LIBRARIES["timm"]}
    assert [module for module in timm.list_modules() if not names & set(timm.list_models(module=module))] == []
