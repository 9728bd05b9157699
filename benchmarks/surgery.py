"""How long a cut takes and how long a pruned network takes to load, and is the cut exact? Against Torch-Pruning.

    python -m benchmarks.surgery [--quick] [--only resnet18] [--repeats 5]

25 networks of torchvision and timm, untrained, one image, one thread. Both tools drop half of all dimensions by their
magnitude: ours with the budget `dims: 50%`, Torch-Pruning with its ratio of 0.5 (peer.py has its settings). Channels
and residual streams of convolutional networks are cut; of transformers queries, keys, values and MLPs.

Time: find groups, prove them, choose, plan and slice, against graph and step, in turns in one process for each network;
the first turn is a warm-up. The machine may have other work, so ratios are of neighbours in time, and those of CPU
seconds are given as well. Exact: the largest difference between the network with what is dropped zeroed and the sliced
one, in double precision, as a part of the largest output. Reload: `compress.load` into a fresh dense network, all of
it and beyond reading the file, against `torch.load` of the pickled network, which is what Torch-Pruning saves. Each
network has a process of its own, in which Torch-Pruning is stopped if its first cut takes more than 120 seconds.
"""

from __future__ import annotations

import gc
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file
from torch import nn

import compress
from compress import search
from compress.budget import choose
from compress.discover import find_groups
from compress.plan import Plan
from compress.recipe import Recipe
from compress.slicing import slice_

from . import coverage, memory, peer, results, zoo

CHANNELS = {"channels": True, "residual": True}
DIMENSIONS = {"channels": False, "attention": True, "mlp": True}
CONVOLUTIONAL = """
resnet18 resnet50 wide_resnet50_2 resnext50_32x4d mobilenet_v2 mobilenet_v3_large mnasnet1_0 efficientnet_b0
regnet_y_400mf densenet121 vgg16_bn shufflenet_v2_x1_0 googlenet convnext_tiny resnetv2_50 darknet53 cspdarknet53 dla34
res2net50_26w_4s repvgg_a0
""".split()  # noqa: SIM905
NAMES = CONVOLUTIONAL + zoo.TRANSFORMERS
QUICK = ("resnet18", "mobilenet_v2", "resnet50", "deit_tiny_patch16_224")
LIMIT = 120  # seconds that Torch-Pruning has for one cut
LONG = 60  # seconds of turns, after which no more are begun
BARS = {"time_ratio": 0.5, "reload_seconds": 0.3, "memory_ratio": memory.BAR}
COLUMNS = ("model", "ours s", "Torch-Pruning s", "ratio", "range", "CPU ratio", "ours off by", "Torch-Pruning off by")
COLUMNS += ("MACs left", "its MACs left", "load ms", "beyond reading", "torch.load ms")


def recipe(name: str) -> Recipe:
    target = DIMENSIONS if name in zoo.TRANSFORMERS else CHANNELS
    return Recipe.load({"target": target, "budget": {"dims": "50%"}, "search": {}})


def ours(name: str, model: nn.Module, inputs: Any) -> dict[str, float]:
    """Cut once; seconds of every stage."""
    asked = recipe(name)
    marks = [time.perf_counter()]
    groups = find_groups(model, inputs, asked.target)
    marks.append(time.perf_counter())
    importance = search.importance(asked.search, model, groups, asked.seed)
    ranking = asked.search.ranks_by(groups, asked.budget.unit)
    keep = choose(groups, importance, asked.budget, asked.target, ranking=ranking)
    marks.append(time.perf_counter())
    slice_(model, Plan.build(model, groups, keep))
    marks.append(time.perf_counter())
    return dict(zip(("find", "choose", "slice"), (b - a for a, b in pairwise(marks)), strict=True))


def peers(name: str, model: nn.Module, inputs: Any) -> dict[str, float]:
    start = time.perf_counter()
    tool = peer.pruner(name, model, inputs)
    built = time.perf_counter()
    tool.step()
    peer.set_widths_(model)
    return {"graph": built - start, "step": time.perf_counter() - built}


def speed(name: str, repeats: int, peer_too: bool) -> dict[str, Any]:
    """Both tools in turns on fresh copies of one network."""
    tools: dict[str, Callable[..., dict[str, float]]] = {"ours": ours}
    options: dict[str, Any] = {}
    if peer_too:
        tools["torch-pruning"], options = peers, peer.options(name)
    runs: dict[str, list[dict[str, float]]] = {tool: [] for tool in tools}
    cpu: dict[str, list[float]] = {tool: [] for tool in tools}
    begun = time.perf_counter()
    for turn in range(repeats + 1):
        if turn > 1 and time.perf_counter() - begun > LONG:
            break
        for tool, cut in tools.items():
            model, inputs = zoo.build(name, **options), zoo.example(name)
            gc.collect()  # else what others left is collected at the cost of one of the two
            before = time.process_time()
            seconds = cut(name, model, inputs)
            if turn:
                cpu[tool].append(time.process_time() - before)
                runs[tool].append(seconds)
    total = {tool: [sum(r.values()) for r in times] for tool, times in runs.items()}
    row: dict[str, Any] = {
        "seconds": {tool: median(times) for tool, times in total.items()},
        "cpu_seconds": {tool: median(times) for tool, times in cpu.items()},
        "stages": {t: {stage: median(r[stage] for r in rows) for stage in rows[0]} for t, rows in runs.items()},
    }
    if peer_too:
        ratios = [a / b for a, b in zip(total["ours"], total["torch-pruning"], strict=True)]
        both = [a / b for a, b in zip(cpu["ours"], cpu["torch-pruning"], strict=True)]
        row |= {"ratio": median(ratios), "ratio_range": [min(ratios), max(ratios)], "ratios": ratios}
        row |= {"cpu_ratio": median(both), "cpu_ratios": both}
    return row


def reload(name: str, repeats: int) -> dict[str, Any]:
    """Seconds that `compress.load` takes, and how many of them beyond reading the file."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "pruned"
        compress.prune(zoo.build(name), recipe(name), example_inputs=zoo.example(name), quiet=True).save(saved)
        loads, reads = [], []
        for turn in range(repeats + 1):
            fresh = zoo.build(name)
            gc.collect()
            start = time.perf_counter()
            load_file(saved / "model.safetensors")
            read = time.perf_counter()
            compress.load(fresh, saved)
            done = time.perf_counter()
            if turn:
                reads.append(read - start)
                loads.append(done - read)
        sizes = {path.name: path.stat().st_size for path in saved.iterdir()}
    beyond = [a - b for a, b in zip(loads, reads, strict=True)]
    return {
        "file_bytes": sizes["model.safetensors"],
        "plan_bytes": sizes["plan.json"],
        "load_seconds": median(loads),
        "read_seconds": median(reads),
        "beyond_reading_seconds": median(beyond),
    }


def pickled(name: str, repeats: int) -> float:
    """Seconds that `torch.load` takes to bring back the whole network that Torch-Pruning left."""
    model = zoo.build(name, **peer.options(name))
    peers(name, model, zoo.example(name))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model, Path(folder) / "model.pt")
        times = []
        for _ in range(repeats + 1):
            gc.collect()
            start = time.perf_counter()
            torch.load(Path(folder) / "model.pt", weights_only=False)
            times.append(time.perf_counter() - start)
    return median(times[1:])


def tried(run: Callable[[], dict[str, Any]], limit: int = 0) -> dict[str, Any]:
    """What came of it: a `status` and, if it crashed or did not end within so many seconds, the error."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        return run()
    except TimeoutError:
        return {"status": "hang", "error": f"not done after {limit} s"}
    except Exception as error:  # this is what the benchmark is about
        return {"status": "crash", "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    finally:
        signal.alarm(0)


def measure(name: str, repeats: int) -> dict[str, Any]:
    """All that is to be known of one network, in this process."""
    other = tried(lambda: peer.run(name), LIMIT)
    if other["status"] == "ok":
        other["load_seconds"] = pickled(name, repeats)
    cut = other["status"] in ("ok", "does not run")  # what it left may not run; that it was cut can be timed
    row = tried(lambda: speed(name, repeats, cut) | {"status": "ok"})
    mine = tried(lambda: coverage.run(name, recipe(name)) | {"reload": reload(name, repeats)})
    return row | {"exact": mine, "torch-pruning": other}


def apart(name: str, repeats: int) -> dict[str, Any]:
    """`measure` in a process of its own, which has all modules of this one: importing them would take the most time."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(measure, name, repeats).result()


def cells(name: str, row: dict[str, Any]) -> list[str]:
    mine, other = row["exact"], row["torch-pruning"]
    seconds = row.get("seconds", {})
    low, high = row.get("ratio_range", (0.0, 0.0))
    known = "ratio" in row

    def number(value: Any, form: str, factor: float = 1.0) -> str:
        return format(value * factor, form) if isinstance(value, (int, float)) else ""

    its = number(seconds.get("torch-pruning"), ".2f")
    return [
        name,
        number(seconds.get("ours"), ".2f") or row["status"],
        its or other["status"],
        number(row.get("ratio"), ".2f"),
        f"{low:.2f} .. {high:.2f}" if known else "",
        number(row.get("cpu_ratio"), ".2f"),
        number(mine.get("difference"), ".0e") or mine["status"],
        number(other.get("difference"), ".0e") or other["status"],
        number(mine.get("macs_left"), ".0%"),
        number(other.get("macs_left"), ".0%"),
        number(mine.get("reload", {}).get("load_seconds"), ".0f", 1e3),
        number(mine.get("reload", {}).get("beyond_reading_seconds"), ".0f", 1e3),
        number(other.get("load_seconds"), ".0f", 1e3),
    ]


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    timed = {name: row for name, row in rows.items() if "ratio" in row}
    ratios, cpu = ([row[key] for row in timed.values()] for key in ("ratio", "cpu_ratio"))
    mine, other = ([row[key] for row in rows.values()] for key in ("exact", "torch-pruning"))
    return {
        "models": len(rows),
        "timed_against_each_other": len(timed),
        "time_ratio": median(ratios) if ratios else None,
        "time_ratio_range": [min(ratios), max(ratios)] if ratios else None,
        "time_cpu_ratio": median(cpu) if cpu else None,
        "at_most_half": [name for name, row in timed.items() if row["cpu_ratio"] <= BARS["time_ratio"]],
        "faster": [name for name, row in timed.items() if row["cpu_ratio"] < 1],
        "ours_exact": sum(coverage.verdict(row)["exact"] for row in mine),
        "torch-pruning_exact": sum(coverage.verdict(row)["exact"] for row in other),
        "torch-pruning_status": {n: r["torch-pruning"]["status"] for n, r in rows.items()},
        "reload_seconds": max((r["reload"]["beyond_reading_seconds"] for r in mine if "reload" in r), default=None),
    }


def sheets(content: dict[str, Any]) -> list[results.Sheet]:
    found = [results.Sheet(COLUMNS, [cells(*row) for row in content["models"].items()])]
    return [*found, memory.sheet(content["memory"])] if "memory" in content else found


def main() -> None:
    parser = results.options_of(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these networks; the result is not stored")
    parser.add_argument("--repeats", type=int, help="timed turns after one warm-up: 5, or 3 with --quick")
    options = parser.parse_args()
    repeats = options.repeats or (3 if options.quick else 5)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    console, rows, content = results.console(), dict[str, Any](), dict[str, Any]()
    file = results.named("surgery", options.quick)
    for name in track(options.only or (QUICK if options.quick else NAMES), "networks", console=console):
        rows[name] = apart(name, repeats)
        console.print(" | ".join(cells(name, rows[name])))
        content = {"summary": summary(rows), "bars": BARS, "models": rows}
        if not options.only:  # what is measured is kept, should the rest not come to an end
            results.save(file, content)
    if not options.quick and not options.only:
        content["memory"] = {n: memory.memory(n) for n in track(memory.NAMES, "memory", console=console)}
        content["summary"]["memory_ratio"] = max(r["above_baseline_ratio"] for r in content["memory"].values())
    for key, bar in BARS.items():
        if (value := content["summary"].get(key)) is not None:
            console.print(f"{key}: {value:.2f}, the bar is {bar} ({'met' if value <= bar else '[red]missed[/]'})")
    if not options.only:
        results.save(file, content)
    results.show(file if not options.only else results.named("surgery_only", True), sheets(content))


if __name__ == "__main__":
    main()
