"""How long a cut takes, how long a pruned network takes to load, and how much memory finding groups needs.

    python -m benchmarks.surgery [--only resnet18] [--repeats 5]

Time: find groups, choose, plan and slice, against Torch-Pruning's graph and step, in turns in one process with one
thread. The first run of each is a warm-up. Reload: `compress.load` of a pruned ResNet-50 less the time of reading its
file. Memory: the peak of a process that finds groups against that of one that runs the network once, each after groups
of a tiny network were found, so that what is compared is the network's own. The kernel's high-water mark is set back
before (Linux): a process starts with that of its parent, and building a network leaves one of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file
from torch import nn

import compress
from compress import search
from compress.budget import choose
from compress.discover import find_groups
from compress.plan import Plan
from compress.recipe import Recipe
from compress.slicing import slice_

from . import results, zoo

RECIPE = Recipe.load({"target": {"channels": True, "residual": True}, "budget": {"macs": "50%"}, "search": {}})
NAMES = """
resnet18 resnet50 mobilenet_v2 densenet121 vgg16_bn regnet_y_400mf resnetv2_50 darknet53
""".split()  # noqa: SIM905
MEMORY = ("resnet18", "resnet50", "mobilenet_v2", "vgg16_bn", "densenet121")
BARS = {"time_ratio": 0.5, "reload_seconds": 0.3, "memory_ratio": 2.0}


def ours(name: str, model: nn.Module, inputs: Any) -> dict[str, float]:
    """Cut once; seconds of every stage."""
    marks = [time.perf_counter()]
    groups = find_groups(model, inputs, RECIPE.target)
    marks.append(time.perf_counter())
    importance = search.importance(RECIPE.search, model, groups, RECIPE.seed)
    keep = choose(groups, importance, RECIPE.budget, RECIPE.target, ranking=RECIPE.search.ranking)
    marks.append(time.perf_counter())
    slice_(model, Plan.build(model, groups, keep))
    marks.append(time.perf_counter())
    return dict(zip(("find", "choose", "slice"), (b - a for a, b in pairwise(marks)), strict=True))


def peers(name: str, model: nn.Module, inputs: Any) -> dict[str, float]:
    from . import peer

    start = time.perf_counter()
    tool = peer.pruner(name, model, inputs)
    built = time.perf_counter()
    tool.step()
    return {"graph": built - start, "step": time.perf_counter() - built}


def speed(name: str, repeats: int) -> dict[str, Any]:
    """Both tools in turns on fresh copies of one network."""
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "torch-pruning": []}
    cpu: dict[str, list[float]] = {"ours": [], "torch-pruning": []}
    tools: dict[str, Callable[..., dict[str, float]]] = {"ours": ours, "torch-pruning": peers}
    for turn in range(repeats + 1):
        for tool, cut in tools.items():
            model, inputs = zoo.build(name), zoo.example(name)
            before = time.process_time()
            seconds = cut(name, model, inputs)
            if turn:
                cpu[tool].append(time.process_time() - before)
                runs[tool].append(seconds)
    total = {tool: [sum(r.values()) for r in times] for tool, times in runs.items()}
    ratios = [a / b for a, b in zip(total["ours"], total["torch-pruning"], strict=True)]
    stages = {t: {stage: median(r[stage] for r in rows) for stage in rows[0]} for t, rows in runs.items()}
    return {
        "ratio": median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "cpu_ratio": median(a / b for a, b in zip(cpu["ours"], cpu["torch-pruning"], strict=True)),
        "seconds": {tool: median(times) for tool, times in total.items()},
        "cpu_seconds": {tool: median(times) for tool, times in cpu.items()},
        "stages": stages,
        "ratios": ratios,
    }


def reload(repeats: int, name: str = "resnet50") -> dict[str, Any]:
    """Seconds that `compress.load` takes beyond reading the file."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "pruned"
        compress.prune(zoo.build(name), RECIPE, example_inputs=zoo.example(name)).save(saved)
        loads, reads = [], []
        for turn in range(repeats + 1):
            fresh = zoo.build(name)
            start = time.perf_counter()
            load_file(saved / "model.safetensors")
            read = time.perf_counter()
            compress.load(fresh, saved)
            done = time.perf_counter()
            if turn:
                reads.append(read - start)
                loads.append(done - read)
        size = (saved / "model.safetensors").stat().st_size
        plan_size = (saved / "plan.json").stat().st_size
    beyond = [a - b for a, b in zip(loads, reads, strict=True)]
    return {
        "model": name,
        "file_bytes": size,
        "plan_bytes": plan_size,
        "load_seconds": median(loads),
        "read_seconds": median(reads),
        "beyond_reading_seconds": median(beyond),
        "beyond_reading_range": [min(beyond), max(beyond)],
    }


def peak(what: str, name: str) -> None:
    """Worker: kilobytes of resident memory before, and at the peak of, one way to use the network."""
    tiny = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    find_groups(tiny, torch.zeros(1, 3, 4, 4), RECIPE.target)
    model, inputs = zoo.build(name), zoo.example(name)
    weights = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]) // 1024
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free would be used first, and not show
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    if what == "groups":
        find_groups(model, inputs, RECIPE.target)
    else:
        with torch.no_grad():
            model(inputs)
    print(json.dumps({"before": before, "peak": _status("VmHWM"), "weights": weights}))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def memory(name: str, repeats: int = 3) -> dict[str, Any]:
    """Peaks of fresh processes in kilobytes, in turns; what the allocator does differs from run to run."""
    command = [sys.executable, "-m", "benchmarks.surgery", "--model", name, "--peak"]
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


def show_speed(rows: dict[str, dict[str, Any]]) -> Table:
    view = Table(
        "model", "ratio", "range", "CPU ratio", "ours s", "find", "choose", "slice", "Torch-Pruning s", "graph", "step"
    )
    for name, r in rows.items():
        stages = r["stages"]
        low, high = r["ratio_range"]
        colour = "green" if r["ratio"] <= BARS["time_ratio"] else "red"
        seconds = {tool: [f"{v:.2f}" for v in stages[tool].values()] for tool in stages}
        total = {tool: f"{r['seconds'][tool]:.2f}" for tool in stages}
        cells = [total["ours"], *seconds["ours"], total["torch-pruning"], *seconds["torch-pruning"]]
        view.add_row(name, f"[{colour}]{r['ratio']:.2f}", f"{low:.2f} .. {high:.2f}", f"{r['cpu_ratio']:.2f}", *cells)
    return view


def show_memory(rows: dict[str, dict[str, Any]]) -> Table:
    view = Table(
        "model", "groups / forward, above baseline", "range", "whole process", "groups MB", "forward MB", "weights MB"
    )
    for name, r in rows.items():
        ratio = r["above_baseline_ratio"]
        colour = "green" if ratio < BARS["memory_ratio"] else "red"
        sizes = [f"{kb / 1024:.0f}" for kb in (*r["above_baseline_kb"].values(), r["weights_kb"])]
        low, high = r["above_baseline_range"]
        spread = f"{low:.2f} .. {high:.2f}"
        view.add_row(name, f"[{colour}]{ratio:.2f}", spread, f"{r['whole_process_ratio']:.2f}", *sizes)
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these networks; the result is not stored")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each, after one warm-up")
    parser.add_argument("--peak", choices=("groups", "forward"), help="worker: memory of one process, as JSON")
    parser.add_argument("--model", choices=zoo.NAMES, default="resnet18", help="the worker's network")
    options = parser.parse_args()
    if options.peak:
        return peak(options.peak, options.model)
    torch.set_num_threads(1)
    console = results.console()
    names = options.only or NAMES
    times = {name: speed(name, options.repeats) for name in track(names, "time", console=console)}
    console.print(show_speed(times))
    loading = reload(options.repeats)
    peaks = {n: memory(n) for n in track(options.only or MEMORY, "memory", console=console)}
    console.print(show_memory(peaks))
    ratio = median(r["ratio"] for r in times.values())
    summary = {
        "time_ratio": ratio,
        "time_ratio_range": [min(r["ratio"] for r in times.values()), max(r["ratio"] for r in times.values())],
        "time_cpu_ratio": median(r["cpu_ratio"] for r in times.values()),
        "reload_seconds": loading["beyond_reading_seconds"],
        "memory_ratio": max(r["above_baseline_ratio"] for r in peaks.values()),
        "memory_ratio_median": median(r["above_baseline_ratio"] for r in peaks.values()),
        "memory_whole_process_ratio": max(r["whole_process_ratio"] for r in peaks.values()),
    }
    for key, bar in BARS.items():
        met = summary[key] <= bar
        console.print(f"{key}: {summary[key]:.2f}, the bar is {bar} ({'met' if met else '[red]missed[/]'})")
    if not options.only:
        content = {"summary": summary, "bars": BARS, "time": times, "reload": loading, "memory": peaks}
        console.print(f"wrote {results.save('surgery', content).relative_to(results.ROOT)}")


if __name__ == "__main__":
    main()
