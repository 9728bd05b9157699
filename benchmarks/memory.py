"""How much memory finding groups needs: the peak of a process that does against that of one that runs the network once.

    python -m benchmarks.memory [NAME groups]

Each after groups of a tiny network were found, so that what is compared is the network's own. The kernel's high-water
mark is set back before (Linux): a process starts with that of its parent, and building a network leaves one of its own.
`benchmarks.surgery` calls it; with a name and what to do it is the worker.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from compress.discover import find_groups
from compress.recipe import Target

from . import results, zoo

NAMES = ("resnet50", "mobilenet_v2")
TARGET = Target(channels=True, residual=True)
BAR = 2.0


def peak(what: str, name: str) -> None:
    """Worker: kilobytes of resident memory before, and at the peak of, one way to use the network."""
    tiny = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    find_groups(tiny, torch.zeros(1, 3, 4, 4), TARGET)
    model, inputs = zoo.build(name), zoo.example(name)
    weights = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]) // 1024
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free would be used first, and not show
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    if what == "groups":
        find_groups(model, inputs, TARGET)
    else:
        with torch.no_grad():
            model(inputs)
    print(json.dumps({"before": before, "peak": _status("VmHWM"), "weights": weights}))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def memory(name: str, repeats: int = 3) -> dict[str, Any]:
    """Peaks of fresh processes in kilobytes, in turns; what the allocator does differs from run to run."""
    command = [sys.executable, "-m", "benchmarks.memory", name]
    found: dict[str, list[dict[str, int]]] = {"groups": [], "forward": []}
    for _ in range(repeats):
        for what, rows in found.items():
            done = subprocess.run([*command, what], cwd=results.ROOT, capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    more = {what: [r["peak"] - r["before"] for r in rows] for what, rows in found.items()}
    if min(more["forward"]) <= 0:
        raise RuntimeError(f"{name}: a forward pass did not raise the peak of memory, so there is nothing to compare")
    peaks = {what: median(r["peak"] for r in rows) for what, rows in found.items()}
    ratios = [a / b for a, b in zip(more["groups"], more["forward"], strict=True)]
    return {
        "above_baseline_ratio": median(ratios),
        "above_baseline_range": [min(ratios), max(ratios)],
        "whole_process_ratio": peaks["groups"] / peaks["forward"],
        "above_baseline_kb": {what: median(values) for what, values in more.items()},
        "weights_kb": found["groups"][0]["weights"],
        "processes": found,
    }


def sheet(rows: dict[str, dict[str, Any]]) -> results.Sheet:
    lines = []
    for name, r in rows.items():
        sizes = [f"{kb / 1024:.0f}" for kb in (*r["above_baseline_kb"].values(), r["weights_kb"])]
        low, high = r["above_baseline_range"]
        spread = [f"{r['above_baseline_ratio']:.2f}", f"{low:.2f} .. {high:.2f}", f"{r['whole_process_ratio']:.2f}"]
        lines.append([name, *spread, *sizes])
    columns = ("model", "groups / forward", "range", "whole process", "groups MB", "forward MB", "weights MB")
    return results.Sheet(columns, lines, "Memory beyond the weights, of finding groups and of a forward pass")


def main() -> None:
    if len(sys.argv) == 3:
        return peak(sys.argv[2], sys.argv[1])
    results.console().print(sheet({name: memory(name) for name in NAMES}))


if __name__ == "__main__":
    main()
