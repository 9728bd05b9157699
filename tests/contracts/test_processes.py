"""Two processes that prune one model, on gloo, end with one plan and one network: that of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils import _pytree as pytree

from helpers.two_processes import (
    FEATURES,
    FINETUNE,
    IGNORING,
    OPERATION_SEARCHES,
    SEARCHES,
    choose_operations,
    detector,
    every_operation_search,
    every_search,
    landscape,
    prune_small_network,
    repair,
    repair_attention,
    repair_small_attention,
    repair_small_network,
    run_in_two_processes,
    uneven_losses,
)


def test_two_processes_find_what_one_finds_with_batches_twice_as_large(tmp_path: Path) -> None:
    """The same samples in the same order, in float64, to rounding: every search, and fine-tuning."""
    first, second = run_in_two_processes(every_search, tmp_path)
    assert first == second
    assert first["files"] == ["model.safetensors", "plan.json", "report.html", "report.json", "run.json"]
    alone = [prune_small_network(search, 32) for search in SEARCHES]
    alone.append(prune_small_network(SEARCHES[0], 32, **FINETUNE))
    for ours, theirs in zip(first["runs"], alone, strict=True):
        check_same_run(ours, theirs)


def check_same_run(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["keep"] == theirs["keep"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-9)
    assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-9)
    for a, b in zip(ours["weights"], theirs["weights"], strict=True):
        assert a == pytest.approx(b, rel=1e-8, abs=1e-10)
    check_same_costs(ours.get("costs", []), theirs.get("costs", []))


def check_same_costs(ours: list[Any], theirs: list[Any]) -> None:
    """Check costs of scores, losses and entropies, which are recorded with six digits."""
    left, right = (pytree.tree_flatten(costs) for costs in (ours, theirs))
    assert left[1] == right[1]
    for a, b in zip(left[0], right[0], strict=True):
        assert a == (pytest.approx(b, rel=2e-5, abs=1e-9) if isinstance(b, float) else b)


def test_two_processes_choose_the_operations_that_one_chooses(tmp_path: Path) -> None:
    first, second = run_in_two_processes(every_operation_search, tmp_path)
    assert first == second
    for ours, search in zip(first["runs"], OPERATION_SEARCHES, strict=True):
        theirs = choose_operations(search, 32)
        assert ours["choices"] == theirs["choices"]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-8)
        assert ours["strengths"] == pytest.approx(theirs["strengths"], rel=1e-6)
        check_same_costs(ours["costs"], theirs["costs"])


def test_two_processes_find_the_landscape_that_one_finds(tmp_path: Path) -> None:
    first, second = run_in_two_processes(landscape, tmp_path)
    assert first == second == json.loads((tmp_path / "landscape.json").read_text())
    alone = landscape(tmp_path)
    assert first["surfaces"][0]["variance"][0] == pytest.approx(alone["surfaces"][0]["variance"][0], rel=1e-10)
    assert first["surfaces"][0]["loss"] == alone["surfaces"][0]["loss"]


def test_two_processes_average_losses_over_all_counted_targets_and_features(tmp_path: Path) -> None:
    """Every third target is ignored, and all that one process reads in a step; features have other norms in each."""
    first, second = run_in_two_processes(uneven_losses, tmp_path)
    assert first == second
    check_same_run(first["features"], prune_small_network(batch=32, **FEATURES))
    for ours, settings in zip(first["ignored"], IGNORING, strict=True):
        check_same_run(ours, prune_small_network(batch=32, ignored=True, **settings))


def test_two_processes_repair_as_one_does(tmp_path: Path) -> None:
    first, second = run_in_two_processes(repair, tmp_path)
    assert first == second
    assert first["given"]["metrics"] == {"batches": 8}  # of both processes
    check_same_run(first["given"], repair_small_network(given=True))
    check_same_run(first["train"], repair_small_network(given=False))


def test_two_processes_repair_queries_and_keys_as_one_does(tmp_path: Path) -> None:
    first, second = run_in_two_processes(repair_attention, tmp_path)
    assert first[:-2] == second[:-2]
    expected = repair_small_attention()
    assert first == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert expected[-1] < expected[-2]


def test_two_processes_prune_a_detector(tmp_path: Path) -> None:
    from helpers.detectors import make_pictures

    make_pictures(tmp_path / "pictures", count=8)
    first, second = run_in_two_processes(detector, tmp_path)
    images = [first.pop("seen"), second.pop("seen")]
    assert sorted(images[0] + images[1]) == list(range(8))
    assert first == second
    assert first["steps"] == [1]  # four images each, in one batch
