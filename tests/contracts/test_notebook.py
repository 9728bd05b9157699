"""The notebook runs from the first cell to the last, and its stored outputs are its own."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "prune_a_network.ipynb"
PROMISES = ("can be met", "exact\n", "the same bits: True", "below 1e-4 of the output: True")


def said(notebook: nbformat.NotebookNode) -> str:
    """All that its cells print."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


def pictures(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_stored_results_are_whole_small_and_of_no_machine() -> None:
    stored = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(stored)
    counts = [cell.execution_count for cell in stored.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)], "run it: jupyter execute --inplace examples/prune_a_network.ipynb"
    assert NOTEBOOK.stat().st_size < 300_000
    assert not re.search(r"(?i)/(home|root|tmp|work|usr|opt|users)/|\\users\\|warning", said(stored))
    assert all(promise in said(stored) for promise in PROMISES)
    assert pictures(stored) == 3


def test_it_runs_and_keeps_its_promises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    assert all(promise in said(notebook) for promise in PROMISES)
    assert pictures(notebook) == 3
    dense_macs, macs = map(int, re.findall(r"MACs: (\d+) -> (\d+)", said(notebook))[0])
    assert 0.4 < macs / dense_macs <= 0.5
    accuracy = [float(part) for part in re.findall(r"([\d.]+)%", said(notebook).split("accuracy: ")[1])]
    assert accuracy[2] > accuracy[0] - 2, "fine-tuned, it is near the dense network"
