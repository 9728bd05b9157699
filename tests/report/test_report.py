"""Reports as files: what was saved is loaded, and damage is named."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

import compress
from cases import CASES, build, example
from compress.report.report import NetworkNumbers, Report


@pytest.fixture(scope="module")
def report() -> Report:
    """The report of a small network, pruned without data."""
    recipe = {"budget": {"dims": "60%"}, "timing": {"repeats": 3}}
    return compress.prune(build(CASES["chain"]), recipe, example_inputs=example(CASES["chain"]), quiet=True).report


def test_saved_report_is_loaded_as_it_was(report: Report, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(report.to_json())
    assert Report.load(tmp_path / "report.json") == report


def test_damaged_report_is_refused_by_name(report: Report, tmp_path: Path) -> None:
    data = json.loads(report.to_json())
    path = tmp_path / "report.json"
    for text in (
        "",
        "[",
        "3",
        "{}",
        json.dumps(data | {"groups": [3]}),
        json.dumps(data | {"dense": {"a": 1}}),
        "[" * 10**5,
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"report\.json: not a report, or a damaged one \("):
            Report.load(path)


def test_repr_has_the_first_metric_of_both_networks() -> None:
    numbers = NetworkNumbers(10, 20, {"accuracy": 0.914, "loss": 0.3}), NetworkNumbers(5, 10, {"accuracy": 0.9})
    dense, pruned = numbers
    assert repr(Report(dense, pruned, [], [])).startswith("Report(accuracy 90.00 % (dense 91.40 %), 10 of 20 MACs")
    assert repr(Report(NetworkNumbers(10, 20), NetworkNumbers(5, 10), [], [])).startswith("Report(10 of 20 MACs")
    dense.test, pruned.test = {"accuracy": 0.85}, {"accuracy": 0.8}
    assert repr(Report(dense, pruned, [], [])).startswith("Report(test accuracy 80.00 % (dense 85.00 %), 10 of 20 MACs")


def test_test_metrics_are_a_line_of_their_own_and_survive_the_file(tmp_path: Path) -> None:
    dense = NetworkNumbers(10, 20, {"accuracy": 0.914}, test={"accuracy": 0.85, "mAP": 41.5})
    report = Report(dense, NetworkNumbers(5, 10, {"accuracy": 0.9}, test={"accuracy": 0.8}), [], [])
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report)
    lines = [re.findall(r"[\w.%-]+", line) for line in console.export_text().splitlines()]
    assert ["accuracy", "91.40", "%", "90.00", "%"] in lines
    assert ["test", "accuracy", "85.00", "%", "80.00", "%"] in lines
    assert next(line for line in lines if line[:2] == ["test", "mAP"])[-1] == "-"
    (tmp_path / "report.json").write_text(report.to_json())
    assert Report.load(tmp_path / "report.json") == report
