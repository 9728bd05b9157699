"""Shared code of the benchmarks; docs/results.md and the README match the saved results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import accuracy, communication, methods, page, results

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    return tmp_path / "results"


def test_results_page_is_up_to_date() -> None:
    """Runs in its own process, because it imports every benchmark."""
    for package in ("mmdet", "onnxruntime"):
        pytest.importorskip(package)
    completed = subprocess.run(
        [sys.executable, "-m", "benchmarks.page", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_tables_in_readme_and_guide_match_the_results() -> None:
    """Compares every line of the accuracy and surgery tables."""
    readme, guide = ((ROOT / path).read_text("utf-8") for path in ("README.md", "docs/choose.md"))
    measured = results.load("accuracy")
    lines = accuracy.summary(measured).markdown().splitlines()
    assert [line for line in lines if line not in readme] == []
    cells = {
        (setting, method): rows
        for setting, method_rows in accuracy.rows_by_setting(measured)
        for method, rows in method_rows.items()
    }
    for method in accuracy.OURS:
        line = [method]
        for percent_left in accuracy.BUDGETS:
            rows = cells.get((("resnet20", f"{percent_left}%", "taught"), method), [])
            if not rows and method in accuracy.APS_METHODS:  # measured at 50 % only
                line += ["-", "-"]
                continue
            line += [methods.format_percent([row[key] for row in rows]) for key in ("sliced", "tuned")]
        assert f"| {' | '.join(line)} |" in guide
    surgery = results.load("surgery")["summary"]
    low, high = surgery["time_ratio_range"]
    assert f"| {surgery['time_ratio']:.2f} ({low:.2f} to {high:.2f})" in readme
    exact = f"{surgery['ours_exact']} | {surgery['torch-pruning_exact']}"
    assert f"| {surgery['models']} networks, exact in double precision | {exact}" in readme


def test_sweep_counts_in_the_readme_match_the_rows() -> None:
    """Counts the rows of the sweep here, not with its summary."""
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    rows = [row for row in results.load("sweep")["rows"] if row["status"] not in ("absent", "not installed")]
    plans, exact, refused = (sum(row.get(key, 0) for row in rows) for key in ("plans", "exact", "refused_plans"))
    half = {row["network"] for row in rows if row["status"] == "exact" and row["macs_left"] <= 0.5}
    assert f"over {len({row['network'] for row in rows})} networks of five libraries applied {plans} random" in readme
    assert f"plans, every group at a width of its own: {exact} are exact, and verification refused {refused}." in readme
    assert f"{len(half)} of the networks reach half of the MACs by some target." in readme


def test_scale_guide_has_the_counted_bytes() -> None:
    table = communication.scaling_table(results.load("communication")).markdown()
    assert table in (ROOT / "docs" / "scale.md").read_text("utf-8")


def test_every_benchmark_is_on_the_page_and_has_a_quick_version() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__name__ ==" in path.read_text("utf-8")}
    assert scripts - {"__main__", "page", "memory", "dense"} == set(page.NAMES)  # helpers without a section
    lacking = [name for name in page.NAMES if "--quick" not in (ROOT / "benchmarks" / f"{name}.py").read_text("utf-8")]
    assert lacking == []


def test_saved_result_contains_the_environment(folder: Path) -> None:
    results.save("made_up", {"rows": [{"seed": 1}, {"seed": 0}, {"seed": 1}]})
    about = json.loads((folder / "made_up.json").read_text("utf-8"))["environment"]
    assert about["seeds"] == [0, 1] and about["memory_gb"] > 0 and about["processor"] and "quick" not in about
    assert {"date", "revision", "torch", "python", "cores", "load"} <= set(about)
    assert [path.name for path in folder.iterdir()] == ["made_up.json"]  # no temporary file remains


def test_quick_run_does_not_overwrite_full_results(folder: Path) -> None:
    results.save("made_up", {"found": 1})
    results.save(results.result_name("made_up", quick=True), {"found": 2})
    assert results.load("made_up")["found"] == 1 and "quick" not in results.load("made_up")["environment"]
    assert results.load("made_up_quick")["environment"]["quick"] is True


def test_git_ignores_quick_results() -> None:
    names = [f"benchmarks/results/cifar{end}" for end in ("_quick.json", "_quick.md", "_quick.log", ".json", ".md")]
    done = subprocess.run(["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 128:
        pytest.skip("not a clone")
    assert done.stdout.split() == names[:3]


def test_result_table_renders_as_markdown_and_on_the_console(folder: Path) -> None:
    table = results.ResultTable(("a", "b"), [["1", "x | y"], ["**2**", "two\nlines"]], "title")
    assert table.markdown() == "title\n\n| a | b |\n| --- | --- |\n| 1 | x \\| y |\n| **2** | two lines |\n"
    with Console(record=True, width=60) as console:
        console.print(table)
    assert "x | y" in console.export_text()
    results.publish("made_up", [table, table])
    assert (folder / "made_up.md").read_text("utf-8") == table.markdown() + "\n" + table.markdown()


def test_measurement_description_handles_missing_fields() -> None:
    old = {"cores": 2, "python": "3", "torch": "2", "torchvision": "0", "timm": "1", "torch-pruning": "1"}
    assert "on an unrecorded date" in page.describe_measurement(old)
    assert "on an unrecorded date, committed on 2026-01-02 as abc: 2 cores" in page.describe_measurement(
        old | {"committed": "2026-01-02 as abc"}
    )
    new = old | {"date": "2026-01-02", "revision": "abc", "processor": "fast", "memory_gb": 4.0, "seeds": [0]}
    assert page.describe_measurement(new).startswith("*Measured on 2026-01-02 at revision abc: 2 cores (fast), 4.0 GB;")


def test_long_tables_are_collapsed() -> None:
    rows = [[str(i)] for i in range(page.MAX_OPEN_ROWS + 1)]
    assert page.render_table(results.ResultTable(("n",), rows)).startswith(
        f"<details><summary>All {page.MAX_OPEN_ROWS + 1} rows"
    )
    assert page.render_table(results.ResultTable(("n",), rows[1:])).startswith("| n |")
