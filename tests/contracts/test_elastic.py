"""A run that lost some of its processes goes on with another number of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def run_python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
    )
    lines = [line for line in done.stderr.splitlines() if "Warning" not in line]
    assert done.returncode == 0, "\n".join(lines[-150:])
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_killed_runs_go_on_with_more_or_fewer_processes(tmp_path: Path) -> None:
    """In float64, killed in the search and in fine-tuning: the same batches in each step give the same result."""
    entries = json.loads(run_python("helpers.elastic_runs", str(tmp_path)).splitlines()[-1])
    assert len(entries) == 5
    for entry in entries:
        (before, after), whole, changed = entry["case"], entry["whole"], entry["changed"]
        assert f"this run was started with {before} process" in changed["messages"]
        if (before, after) == (3, 2):
            assert "a step now reads 4 batches instead of 3, since 3 cannot be divided by 2" in changed["messages"]
            assert max(step for _, step, _ in changed["history"]) == 6  # twice 12 batches, 4 in each
            continue
        assert "a step reads the same" in changed["messages"]
        assert [h[:2] for h in changed["history"]] == [h[:2] for h in whole["history"]]
        assert [h[2] for h in changed["history"]] == pytest.approx([h[2] for h in whole["history"]], rel=1e-9)
        for ours, theirs in zip(changed["weights"], whole["weights"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-10)


def test_torchrun_restarts_a_run_whose_process_was_killed(tmp_path: Path) -> None:
    torchrun = ("torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0", "--rdzv_backend", "c10d")
    launch = (*torchrun, "--rdzv_endpoint", "localhost:0", "--max-restarts")
    run = ("--module", "helpers.elastic_runs")
    killed = json.loads(run_python(*launch, "1", *run, "restart", str(tmp_path / "killed")).splitlines()[-1])
    whole = json.loads(run_python(*launch, "0", *run, "whole", str(tmp_path / "whole")).splitlines()[-1])
    assert killed["restarted"] and not whole["restarted"]
    assert killed["digest"] == whole["digest"]
