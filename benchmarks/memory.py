"""Peak memory of finding groups compared with that of one forward pass, each in its own process.

    python -m benchmarks.memory [NAME groups]

Each process first finds the groups of a tiny network, so that only memory for the measured network counts. The
kernel's high-water mark is reset before the measurement (Linux), because a process inherits that of its parent and
building the network raises it. `benchmarks.surgery` calls this module; with two arguments it runs as worker.
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

from compress.recipe import Target
from compress.surgery import find_groups

from . import results, zoo

NAMES = ("resnet50", "mobilenet_v2")
TARGET = Target(channels=True, residual=True)
GOAL = 2.0  # at most this ratio of the two peaks


def report_peak(operation: str, name: str) -> None:
    """Print resident memory in kilobytes before and at the peak of finding groups or a forward pass, as JSON."""
    tiny = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    find_groups(tiny, torch.zeros(1, 3, 4, 4), TARGET)
    model, inputs = zoo.build_network(name), zoo.example_inputs(name)
    weights = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]) // 1024
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else freed memory is reused and hides the increase
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_kb("VmRSS")
    if operation == "groups":
        find_groups(model, inputs, TARGET)
    else:
        with torch.no_grad():
            model(inputs)
    print(json.dumps({"before": before, "peak": _status_kb("VmHWM"), "weights": weights}))


def _status_kb(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def compare_memory(name: str, repeats: int = 3) -> dict[str, Any]:
    """Measure both operations alternately in fresh processes, repeatedly because the allocator varies between runs."""
    command = [sys.executable, "-m", "benchmarks.memory", name]
    measurements: dict[str, list[dict[str, int]]] = {"groups": [], "forward": []}
    for _ in range(repeats):
        for operation, rows in measurements.items():
            completed = subprocess.run(
                [*command, operation], cwd=results.ROOT, capture_output=True, text=True, check=True
            )
            rows.append(json.loads(completed.stdout.splitlines()[-1]))
    increases = {operation: [r["peak"] - r["before"] for r in rows] for operation, rows in measurements.items()}
    if min(increases["forward"]) <= 0:
        raise RuntimeError(f"{name}: the forward pass did not raise the peak memory, so the ratio is undefined")
    peaks = {operation: median(r["peak"] for r in rows) for operation, rows in measurements.items()}
    ratios = [a / b for a, b in zip(increases["groups"], increases["forward"], strict=True)]
    return {
        "above_baseline_ratio": median(ratios),
        "above_baseline_range": [min(ratios), max(ratios)],
        "whole_process_ratio": peaks["groups"] / peaks["forward"],
        "above_baseline_kb": {operation: median(values) for operation, values in increases.items()},
        "weights_kb": measurements["groups"][0]["weights"],
        "processes": measurements,
    }


def table(rows: dict[str, dict[str, Any]]) -> results.ResultTable:
    """Return the table of memory peaks."""
    lines = []
    for name, r in rows.items():
        sizes = [f"{kb / 1024:.0f}" for kb in (*r["above_baseline_kb"].values(), r["weights_kb"])]
        low, high = r["above_baseline_range"]
        spread = [f"{r['above_baseline_ratio']:.2f}", f"{low:.2f} .. {high:.2f}", f"{r['whole_process_ratio']:.2f}"]
        lines.append([name, *spread, *sizes])
    columns = ("model", "groups / forward", "range", "whole process", "groups MB", "forward MB", "weights MB")
    return results.ResultTable(columns, lines, "Memory beyond the weights: finding groups compared with a forward pass")


def main() -> None:
    if len(sys.argv) == 3:
        return report_peak(sys.argv[2], sys.argv[1])
    results.console().print(table({name: compare_memory(name) for name in NAMES}))


if __name__ == "__main__":
    main()
