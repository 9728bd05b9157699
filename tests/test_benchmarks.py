"""What benchmarks share, and that the page of results is what the results say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import accuracy, methods, page, results

ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    return tmp_path / "results"


def test_page_of_results_is_what_the_results_say() -> None:
    """In a process of its own, which imports every benchmark."""
    for package in ("mmdet", "onnxruntime"):
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.page", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_and_guide_say_what_was_measured() -> None:
    """Every line of the tables that compare, as the results have it."""
    readme, guide = ((ROOT / path).read_text("utf-8") for path in ("README.md", "docs/choose.md"))
    measured = results.load("accuracy")
    lines = accuracy.summary(measured).markdown().splitlines()
    assert [line for line in lines if line not in readme] == []
    cells = {(block, method): rows for block, found in accuracy.blocks(measured) for method, rows in found.items()}
    for method in accuracy.OURS:
        line = [method]
        for left in accuracy.BUDGETS:
            rows = cells[("resnet20", f"{left}%", "taught"), method]
            line += [methods.percents([row[key] for row in rows]) for key in ("sliced", "tuned")]
        assert f"| {' | '.join(line)} |" in guide
    cut = results.load("surgery")["summary"]
    low, high = cut["time_ratio_range"]
    assert f"| {cut['time_ratio']:.2f} ({low:.2f} to {high:.2f})" in readme
    assert (
        f"| {cut['models']} networks, exact in double precision | {cut['ours_exact']} | {cut['torch-pruning_exact']}"
        in readme
    )


def test_every_benchmark_is_on_the_page_and_has_a_quick_version() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__name__ ==" in path.read_text("utf-8")}
    assert scripts - {"__main__", "page", "memory", "dense"} == set(page.NAMES)  # what others call or need
    lacking = [name for name in page.NAMES if "--quick" not in (ROOT / "benchmarks" / f"{name}.py").read_text("utf-8")]
    assert lacking == []


def test_result_says_what_it_was_measured_on(folder: Path) -> None:
    results.save("made_up", {"rows": [{"seed": 1}, {"seed": 0}, {"seed": 1}]})
    about = json.loads((folder / "made_up.json").read_text("utf-8"))["environment"]
    assert about["seeds"] == [0, 1] and about["memory_gb"] > 0 and about["processor"] and "quick" not in about
    assert {"date", "revision", "torch", "python", "cores", "load"} <= set(about)
    assert [path.name for path in folder.iterdir()] == ["made_up.json"]  # and nothing half written


def test_quick_run_leaves_the_full_one_alone_and_says_so(folder: Path) -> None:
    results.save("made_up", {"found": 1})
    results.save(results.named("made_up", quick=True), {"found": 2})
    assert results.load("made_up")["found"] == 1 and "quick" not in results.load("made_up")["environment"]
    assert results.load("made_up_quick")["environment"]["quick"] is True


def test_git_ignores_quick_results() -> None:
    names = [f"benchmarks/results/cifar{end}" for end in ("_quick.json", "_quick.md", "_quick.log", ".json", ".md")]
    done = subprocess.run(["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 128:
        pytest.skip("not a clone")
    assert done.stdout.split() == names[:3]


def test_sheet_is_a_table_in_markdown_and_on_the_console(folder: Path) -> None:
    sheet = results.Sheet(("a", "b"), [["1", "x | y"], ["**2**", "two\nlines"]], "said")
    assert sheet.markdown() == "said\n\n| a | b |\n| --- | --- |\n| 1 | x \\| y |\n| **2** | two lines |\n"
    with Console(record=True, width=60) as console:
        console.print(sheet)
    assert "x | y" in console.export_text()
    results.show("made_up", [sheet, sheet])
    assert (folder / "made_up.md").read_text("utf-8") == sheet.markdown() + "\n" + sheet.markdown()


def test_section_says_what_was_not_written_down() -> None:
    old = {"cores": 2, "python": "3", "torch": "2", "torchvision": "0", "timm": "1", "torch-pruning": "1"}
    assert "a day not written down" in page.measured(old)
    assert "before it was committed on 2026-01-02 as abc: 2 cores" in page.measured(
        old | {"committed": "2026-01-02 as abc"}
    )
    new = old | {"date": "2026-01-02", "revision": "abc", "processor": "fast", "memory_gb": 4.0, "seeds": [0]}
    assert page.measured(new).startswith("*Measured on 2026-01-02 at revision abc: 2 cores (fast), 4.0 GB;")


def test_long_tables_are_folded() -> None:
    rows = [[str(i)] for i in range(page.LONG + 1)]
    assert page.folded(results.Sheet(("n",), rows)).startswith(f"<details><summary>All {page.LONG + 1} rows")
    assert page.folded(results.Sheet(("n",), rows[1:])).startswith("| n |")
