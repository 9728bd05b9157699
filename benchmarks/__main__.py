"""The quick version of every benchmark, one after the other: whether all of it runs, in 20 minutes on two cores.

    python -m benchmarks [--only NAME ...] [--data FOLDER]

Each is `python -m benchmarks.NAME --quick`; its output goes to results/NAME_quick.log, its table to NAME_quick.md.
What the quick versions find is too little to go by; docs/results.md shows what `python -m benchmarks.NAME` finds.
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

NO_DATA = ("coverage", "deploy", "engine", "lenet", "scale", "surgery")


def run(name: str, folder: Path) -> bool:
    """One benchmark in a process of its own; whether it came to its end."""
    given = [] if name in NO_DATA else ["--data", str(folder)]
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", *given]
    results.FOLDER.mkdir(exist_ok=True)
    with (results.FOLDER / f"{name}{results.QUICK}.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(command, cwd=results.ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
    return done.returncode == 0


def _cpu() -> float:
    """Seconds that processes of ours have computed: what tells on a machine that others use, too."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    data.add_option(parser)
    options = parser.parse_args()
    folder = options.data.resolve()
    begin, failed = time.perf_counter(), []
    for number, name in enumerate(options.only, 1):
        print(f"[{number}/{len(options.only)}] {name} ...", end=" ", flush=True)
        start, spent = time.perf_counter(), _cpu()
        done = run(name, folder)
        said = "" if done else f", FAILED: see benchmarks/results/{name}{results.QUICK}.log"
        print(f"{time.perf_counter() - start:.0f} s ({_cpu() - spent:.0f} s of CPU){said}", flush=True)
        failed += [] if done else [name]
    minutes = (time.perf_counter() - begin) / 60
    print(
        f"{len(options.only) - len(failed)} of {len(options.only)} in {minutes:.1f} minutes, {_cpu() / 60:.1f} of CPU"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
