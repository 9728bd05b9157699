"""A run that is killed at any moment and resumed ends with the same bits: in one process, and in two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
RESULT = ["model.safetensors", "plan.json", "report.html", "report.json", "run.json"]


def run_helper(name: str, *arguments: str) -> list[dict[str, Any]]:
    """Return what a program of tests/helpers prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"helpers.{name}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    entries: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return entries


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_killed_at_every_change_of_the_workdir_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Before every open, rename, chmod and removal, and halfway through every write; resumed runs are killed, too."""
    entries = run_helper("killed_writes", str(tmp_path))
    assert len(entries) > 40
    assert {"os.mkdir undisturbed", "open .run.json", "open .checkpoint.safetensors", "os.remove .lock"} <= {
        entry["operation"] for entry in entries
    }
    for entry in entries:
        assert entry["codes"] in ([-9, 0], [-9, -9, 0]), entry
        assert entry["same"], entry
        assert entry["files"] == RESULT, entry


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
@pytest.mark.parametrize(("processes", "points"), [(1, 20), (2, 4)])
def test_killed_anywhere_it_ends_with_the_same_bits(processes: int, points: int, tmp_path: Path) -> None:
    entries = run_helper("killed_runs", str(processes), str(points), str(tmp_path))
    for entry in entries:
        assert entry["again"] == [0] * processes, entry
        assert entry["same"], entry
        assert entry["files"] == RESULT
    killed = [entry for entry in entries if -9 in entry["killed"]]
    assert len(killed) >= points // 2
    assert len({entry["where"] for entry in killed}) >= 2  # stages, not always the same
