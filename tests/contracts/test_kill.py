"""A run that is killed at any moment and resumed ends with the same bits: in one process, and in two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
@pytest.mark.parametrize(("processes", "points"), [(1, 20), (2, 4)])
def test_killed_anywhere_it_ends_with_the_same_bits(processes: int, points: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "helpers.killed_runs", str(processes), str(points), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    entries = json.loads(done.stdout.splitlines()[-1])
    for entry in entries:
        assert entry["again"] == [0] * processes, entry
        assert entry["same"], entry
        assert entry["files"] == ["model.safetensors", "plan.json", "report.html", "report.json", "run.json"]
    killed = [entry for entry in entries if -9 in entry["killed"]]
    assert len(killed) >= points // 2
    assert len({entry["where"] for entry in killed}) >= 2  # stages, not always the same
