"""The cases of docs/why_worse.md: each shows the sign that the guide names, and the cure works."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest

import compress
from helpers.documents import ROOT


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("why_worse", ROOT / "examples" / "why_worse.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accuracies(results: dict[str, compress.Pruned]) -> list[tuple[float, float]]:
    """Return the accuracy after the cut and at the end."""
    reports = [pruned.report for pruned in results.values()]
    return [(report.sliced["accuracy"], report.pruned.metrics["accuracy"]) for report in reports]


def widths(pruned: compress.Pruned) -> dict[str, int]:
    return {row.name: row.kept for row in pruned.report.groups}


def test_too_high_a_rate_shows_in_the_losses_and_not_in_the_cut(cases: Any) -> None:
    results = cases.too_high_a_rate()
    high, low = results.values()
    (cut_high, end_high), (cut_low, end_low) = accuracies(results)
    assert widths(high) == widths(low) and cut_high == cut_low
    losses = [[entry["loss"] for entry in p.report.history if "loss" in entry] for p in (high, low)]
    assert max(losses[0]) > 5 * losses[0][0]
    assert max(losses[1]) < 2 * losses[1][0]
    assert end_low > end_high + 0.1


def test_an_emptied_layer_is_the_most_fragile_and_its_bound_brings_the_accuracy_back(cases: Any) -> None:
    results, sensitivity = cases.emptied_layer()
    emptied, bounded = results.values()
    narrow = [row for row in emptied.report.groups if row.kept == 2]  # min_keep
    assert [row.name for row in narrow] == [sensitivity.groups[0].name]
    assert sum(row.kept == row.width for row in emptied.report.groups) >= 2
    assert all(p.report.pruned.macs <= 0.75 * p.report.dense.macs for p in results.values())
    (cut_emptied, _), (cut_bounded, _) = accuracies(results)
    assert cut_bounded > cut_emptied + 0.3
    assert widths(bounded)[narrow[0].name] >= narrow[0].width // 2


def test_a_budget_that_only_mlps_can_pay_leaves_almost_none_of_them(cases: Any) -> None:
    results, preview = cases.budget_for_mlps()
    alone, shared, _ = results.values()
    assert 0.69 < preview.smallest["macs"] < 0.72 and "the smallest reachable is" in preview.message
    assert all(row.kept <= row.width // 4 for row in alone.report.groups)
    reasons = {row["reason"] for row in alone.report.refused if row["kind"] == "attention"}
    assert reasons == {"target.attention is off"}
    (cut_alone, end_alone), (cut_shared, end_shared), (cut_larger, end_larger) = accuracies(results)
    assert cut_shared > cut_alone + 0.02 and cut_larger > cut_alone + 0.05
    assert end_shared > end_alone and end_larger > end_alone
    assert sum(widths(shared).values()) > sum(widths(alone).values())
