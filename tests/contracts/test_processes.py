"""Two processes that prune one model, on gloo, end with one plan and one network: that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.two_processes import (
    FEATURES,
    FINETUNE,
    IGNORING,
    SEARCHES,
    detector,
    every_search,
    prune_small_network,
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


def test_two_processes_average_losses_over_all_counted_targets_and_features(tmp_path: Path) -> None:
    """Every third target is ignored, and all that one process reads in a step; features have other norms in each."""
    first, second = run_in_two_processes(uneven_losses, tmp_path)
    assert first == second
    check_same_run(first["features"], prune_small_network(batch=32, **FEATURES))
    for ours, settings in zip(first["ignored"], IGNORING, strict=True):
        check_same_run(ours, prune_small_network(batch=32, ignored=True, **settings))


def test_two_processes_prune_a_detector(tmp_path: Path) -> None:
    from helpers.detectors import make_pictures

    make_pictures(tmp_path / "pictures", count=8)
    first, second = run_in_two_processes(detector, tmp_path)
    images = [first.pop("seen"), second.pop("seen")]
    assert sorted(images[0] + images[1]) == list(range(8))
    assert first == second
    assert first["steps"] == [1]  # four images each, in one batch
