"""Reports as files: what was saved is loaded, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import compress
from cases import CASES, build, example
from compress.report.report import Report


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
