"""Run the quick version of every benchmark in sequence, to check that all of them work (20 minutes on two cores).

    python -m benchmarks [--only NAME ...] [--data FOLDER]

Each one runs as `python -m benchmarks.NAME --quick`. Its output goes to results/NAME_quick.log, its table to
results/NAME_quick.md. Quick runs are too short to draw conclusions from; docs/results.md shows the full runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from . import data, results
from .page import NAMES

NO_DATA = (
    "communication",
    "coverage",
    "deploy",
    "detector_pruning",
    "engine",
    "kill",
    "lenet",
    "scale",
    "score_costs",
    "surgery",
    "sweep",
)


def run_benchmark(name: str, folder: Path) -> bool:
    """Run one benchmark in its own process; return whether it succeeded."""
    data_option = [] if name in NO_DATA else ["--data", str(folder)]
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", *data_option]
    results.FOLDER.mkdir(exist_ok=True)
    with (results.FOLDER / f"{name}{results.QUICK_SUFFIX}.log").open("w", encoding="utf-8") as log:
        completed = subprocess.run(command, cwd=results.ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
    return completed.returncode == 0


def _children_cpu_seconds() -> float:
    """Return the CPU seconds of all child processes, which other load on the machine affects less than wall time."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="run only these benchmarks")
    data.add_data_option(parser)
    options = parser.parse_args()
    folder = options.data.resolve()
    begin, failed = time.perf_counter(), []
    for number, name in enumerate(options.only, 1):
        print(f"[{number}/{len(options.only)}] {name} ...", end=" ", flush=True)
        start, cpu_start = time.perf_counter(), _children_cpu_seconds()
        succeeded = run_benchmark(name, folder)
        failure = "" if succeeded else f", FAILED: see benchmarks/results/{name}{results.QUICK_SUFFIX}.log"
        seconds, cpu_seconds = time.perf_counter() - start, _children_cpu_seconds() - cpu_start
        print(f"{seconds:.0f} s ({cpu_seconds:.0f} s CPU){failure}", flush=True)
        failed += [] if succeeded else [name]
    minutes, cpu_minutes = (time.perf_counter() - begin) / 60, _children_cpu_seconds() / 60
    succeeded_count = len(options.only) - len(failed)
    print(
        f"{succeeded_count} of {len(options.only)} succeeded in {minutes:.1f} minutes ({cpu_minutes:.1f} CPU minutes)"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
