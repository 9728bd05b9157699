"""Time of a cut, its exactness, and the time to load a pruned network, compared with Torch-Pruning.

    python -m benchmarks.surgery [--quick] [--only resnet18] [--repeats 5]

25 networks of torchvision and timm, untrained, one image, one thread. Both tools remove half of all dimensions by
magnitude: ours with the budget `dims: 50%`, Torch-Pruning with its ratio of 0.5 (settings in torch_pruning_zoo.py).
Channels and residual streams of convolutional networks are cut; queries, keys, values and MLPs of transformers.

Time: find groups, verify them, choose, plan and slice, compared with Torch-Pruning's graph and step. Both tools run
alternately in one process per network; the first round is a warm-up. Other processes may share the machine, so ratios
are taken between adjacent runs, and also given for CPU seconds. Exactness: the largest difference between the zeroed
and the sliced network in double precision, relative to the largest output. Load: `compress.load` into a fresh dense
network, in total and without reading the file, compared with `torch.load` of the pickled network, which is what
Torch-Pruning saves. Each network runs in its own process, in which Torch-Pruning is stopped if its first cut takes
longer than 120 seconds.
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
from compress.budget import choose_widths
from compress.recipe import Recipe
from compress.search import base as search
from compress.surgery import Plan, find_groups, slice_

from . import coverage, memory, results, torch_pruning_zoo, zoo

CHANNELS = {"channels": True, "residual": True}
DIMENSIONS = {"channels": False, "attention": True, "mlp": True}
CONVOLUTIONAL = """
resnet18 resnet50 wide_resnet50_2 resnext50_32x4d mobilenet_v2 mobilenet_v3_large mnasnet1_0 efficientnet_b0
regnet_y_400mf densenet121 vgg16_bn shufflenet_v2_x1_0 googlenet convnext_tiny resnetv2_50 darknet53 cspdarknet53 dla34
res2net50_26w_4s repvgg_a0
""".split()  # noqa: SIM905
NAMES = CONVOLUTIONAL + zoo.TRANSFORMERS
QUICK_NETWORKS = ("resnet18", "mobilenet_v2", "resnet50", "deit_tiny_patch16_224")
TORCH_PRUNING_TIMEOUT = 120  # seconds for one cut
MAX_TIMING_SECONDS = 60  # no further round starts after this time
GOALS = {"time_ratio": 0.5, "reload_seconds": 0.3, "memory_ratio": memory.GOAL}
COLUMNS = (
    "model",
    "ours s",
    "Torch-Pruning s",
    "ratio",
    "range",
    "CPU ratio",
    "our difference",
    "Torch-Pruning difference",
)
COLUMNS += ("MACs left", "Torch-Pruning MACs left", "load ms", "load without reading ms", "torch.load ms")


def recipe(name: str) -> Recipe:
    """Return the recipe for a network: half of the dimensions by magnitude."""
    target = DIMENSIONS if name in zoo.TRANSFORMERS else CHANNELS
    return Recipe.load({"target": target, "budget": {"dims": "50%"}, "search": {}})


def cut_with_ours(name: str, model: nn.Module, inputs: Any) -> dict[str, float]:
    """Cut once in place; return the seconds of every stage."""
    cut_recipe = recipe(name)
    timestamps = [time.perf_counter()]
    groups = find_groups(model, inputs, cut_recipe.target)
    timestamps.append(time.perf_counter())
    importance = search.data_free_importance(cut_recipe.search, model, groups, cut_recipe.seed)
    ranking = cut_recipe.search.ranking_for(groups, cut_recipe.budget.unit)
    keep = choose_widths(groups, importance, cut_recipe.budget, cut_recipe.target, ranking=ranking)
    timestamps.append(time.perf_counter())
    slice_(model, Plan.build(model, groups, keep))
    timestamps.append(time.perf_counter())
    return dict(zip(("find", "choose", "slice"), (b - a for a, b in pairwise(timestamps)), strict=True))


def cut_with_torch_pruning(name: str, model: nn.Module, inputs: Any) -> dict[str, float]:
    """Cut once in place; return the seconds of every stage."""
    start = time.perf_counter()
    pruner = torch_pruning_zoo.make_pruner(name, model, inputs)
    built = time.perf_counter()
    pruner.step()
    torch_pruning_zoo.set_widths_(model)
    return {"graph": built - start, "step": time.perf_counter() - built}


def compare_speed(name: str, repeats: int, with_torch_pruning: bool) -> dict[str, Any]:
    """Time both tools alternately on fresh copies of one network."""
    tools: dict[str, Callable[..., dict[str, float]]] = {"ours": cut_with_ours}
    options: dict[str, Any] = {}
    if with_torch_pruning:
        tools["torch-pruning"], options = cut_with_torch_pruning, torch_pruning_zoo.build_options(name)
    runs: dict[str, list[dict[str, float]]] = {tool: [] for tool in tools}
    cpu: dict[str, list[float]] = {tool: [] for tool in tools}
    start = time.perf_counter()
    for round_index in range(repeats + 1):
        if round_index > 1 and time.perf_counter() - start > MAX_TIMING_SECONDS:
            break
        for tool, cut in tools.items():
            model, inputs = zoo.build_network(name, **options), zoo.example_inputs(name)
            gc.collect()  # so that neither tool pays for garbage of the other
            before = time.process_time()
            seconds = cut(name, model, inputs)
            if round_index:
                cpu[tool].append(time.process_time() - before)
                runs[tool].append(seconds)
    total = {tool: [sum(r.values()) for r in times] for tool, times in runs.items()}
    row: dict[str, Any] = {
        "seconds": {tool: median(times) for tool, times in total.items()},
        "cpu_seconds": {tool: median(times) for tool, times in cpu.items()},
        "stages": {t: {stage: median(r[stage] for r in rows) for stage in rows[0]} for t, rows in runs.items()},
    }
    if with_torch_pruning:
        ratios = [a / b for a, b in zip(total["ours"], total["torch-pruning"], strict=True)]
        cpu_ratios = [a / b for a, b in zip(cpu["ours"], cpu["torch-pruning"], strict=True)]
        row |= {"ratio": median(ratios), "ratio_range": [min(ratios), max(ratios)], "ratios": ratios}
        row |= {"cpu_ratio": median(cpu_ratios), "cpu_ratios": cpu_ratios}
    return row


def measure_load(name: str, repeats: int) -> dict[str, Any]:
    """Measure the seconds of `compress.load`, in total and without reading the file."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "pruned"
        compress.prune(zoo.build_network(name), recipe(name), example_inputs=zoo.example_inputs(name), quiet=True).save(
            saved
        )
        load_times, read_times = [], []
        for round_index in range(repeats + 1):
            dense = zoo.build_network(name)
            gc.collect()
            start = time.perf_counter()
            load_file(saved / "model.safetensors")
            read = time.perf_counter()
            compress.load(dense, saved)
            done = time.perf_counter()
            if round_index:
                read_times.append(read - start)
                load_times.append(done - read)
        sizes = {path.name: path.stat().st_size for path in saved.iterdir()}
    beyond = [a - b for a, b in zip(load_times, read_times, strict=True)]
    return {
        "file_bytes": sizes["model.safetensors"],
        "plan_bytes": sizes["plan.json"],
        "load_seconds": median(load_times),
        "read_seconds": median(read_times),
        "beyond_reading_seconds": median(beyond),
    }


def measure_torch_load(name: str, repeats: int) -> float:
    """Measure the seconds of `torch.load` of the pickled network that Torch-Pruning pruned."""
    model = zoo.build_network(name, **torch_pruning_zoo.build_options(name))
    cut_with_torch_pruning(name, model, zoo.example_inputs(name))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model, Path(folder) / "model.pt")
        times = []
        for _ in range(repeats + 1):
            gc.collect()
            start = time.perf_counter()
            torch.load(Path(folder) / "model.pt", weights_only=False)
            times.append(time.perf_counter() - start)
    return median(times[1:])


def run_guarded(run: Callable[[], dict[str, Any]], timeout: int = 0) -> dict[str, Any]:
    """Return the row of `run`, or its error if it raises or takes longer than `timeout` seconds (0: no limit)."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(timeout)
    try:
        return run()
    except TimeoutError:
        return {"status": "hang", "error": f"not finished after {timeout} s"}
    except Exception as error:  # failures are results of this benchmark
        return {"status": "crash", "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    finally:
        signal.alarm(0)


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Measure speed, exactness and loading of one network in this process."""
    torch_pruning = run_guarded(lambda: torch_pruning_zoo.prune_and_verify(name), TORCH_PRUNING_TIMEOUT)
    if torch_pruning["status"] == "ok":
        torch_pruning["load_seconds"] = measure_torch_load(name, repeats)
    can_be_timed = torch_pruning["status"] in (
        "ok",
        "does not run",
    )  # a cut can be timed even if its result does not run
    row = run_guarded(lambda: compare_speed(name, repeats, can_be_timed) | {"status": "ok"})
    ours = run_guarded(lambda: coverage.prune_and_verify(name, recipe(name)) | {"reload": measure_load(name, repeats)})
    return row | {"exact": ours, "torch-pruning": torch_pruning}


def measure_in_subprocess(name: str, repeats: int) -> dict[str, Any]:
    """Run `measure` in a forked process, which does not have to import the modules again."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(measure, name, repeats).result()


def table_cells(name: str, row: dict[str, Any]) -> list[str]:
    """Return the table row of a network."""
    ours, torch_pruning = row["exact"], row["torch-pruning"]
    seconds = row.get("seconds", {})
    low, high = row.get("ratio_range", (0.0, 0.0))
    has_ratio = "ratio" in row

    def number(value: Any, spec: str, factor: float = 1.0) -> str:
        return format(value * factor, spec) if isinstance(value, (int, float)) else ""

    torch_pruning_seconds = number(seconds.get("torch-pruning"), ".2f")
    return [
        name,
        number(seconds.get("ours"), ".2f") or row["status"],
        torch_pruning_seconds or torch_pruning["status"],
        number(row.get("ratio"), ".2f"),
        f"{low:.2f} .. {high:.2f}" if has_ratio else "",
        number(row.get("cpu_ratio"), ".2f"),
        number(ours.get("difference"), ".0e") or ours["status"],
        number(torch_pruning.get("difference"), ".0e") or torch_pruning["status"],
        number(ours.get("macs_left"), ".0%"),
        number(torch_pruning.get("macs_left"), ".0%"),
        number(ours.get("reload", {}).get("load_seconds"), ".0f", 1e3),
        number(ours.get("reload", {}).get("beyond_reading_seconds"), ".0f", 1e3),
        number(torch_pruning.get("load_seconds"), ".0f", 1e3),
    ]


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Summarize speed, exactness and loading over all networks."""
    timed = {name: row for name, row in rows.items() if "ratio" in row}
    ratios, cpu = ([row[key] for row in timed.values()] for key in ("ratio", "cpu_ratio"))
    ours, torch_pruning = ([row[key] for row in rows.values()] for key in ("exact", "torch-pruning"))
    return {
        "models": len(rows),
        "timed_against_each_other": len(timed),
        "time_ratio": median(ratios) if ratios else None,
        "time_ratio_range": [min(ratios), max(ratios)] if ratios else None,
        "time_cpu_ratio": median(cpu) if cpu else None,
        "at_most_half": [name for name, row in timed.items() if row["cpu_ratio"] <= GOALS["time_ratio"]],
        "faster": [name for name, row in timed.items() if row["cpu_ratio"] < 1],
        "ours_exact": sum(coverage.check_row(row)["exact"] for row in ours),
        "torch-pruning_exact": sum(coverage.check_row(row)["exact"] for row in torch_pruning),
        "torch-pruning_status": {n: r["torch-pruning"]["status"] for n, r in rows.items()},
        "reload_seconds": max((r["reload"]["beyond_reading_seconds"] for r in ours if "reload" in r), default=None),
    }


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the table of networks and, if measured, that of memory."""
    all_tables = [results.ResultTable(COLUMNS, [table_cells(*row) for row in content["models"].items()])]
    return [*all_tables, memory.table(content["memory"])] if "memory" in content else all_tables


def main() -> None:
    parser = results.make_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these networks; results are not saved")
    parser.add_argument("--repeats", type=int, help="timed rounds after one warm-up; default: 5, or 3 with --quick")
    options = parser.parse_args()
    repeats = options.repeats or (3 if options.quick else 5)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    console, rows, content = results.console(), dict[str, Any](), dict[str, Any]()
    file = results.result_name("surgery", options.quick)
    for name in track(options.only or (QUICK_NETWORKS if options.quick else NAMES), "networks", console=console):
        rows[name] = measure_in_subprocess(name, repeats)
        console.print(" | ".join(table_cells(name, rows[name])))
        content = {"summary": summary(rows), "bars": GOALS, "models": rows}
        if not options.only:  # keeps the measured rows if the run is interrupted
            results.save(file, content)
    if not options.quick and not options.only:
        content["memory"] = {n: memory.compare_memory(n) for n in track(memory.NAMES, "memory", console=console)}
        content["summary"]["memory_ratio"] = max(r["above_baseline_ratio"] for r in content["memory"].values())
    for key, goal in GOALS.items():
        if (value := content["summary"].get(key)) is not None:
            console.print(f"{key}: {value:.2f}, goal {goal} ({'met' if value <= goal else '[red]missed[/]'})")
    if not options.only:
        results.save(file, content)
    results.publish(file if not options.only else results.result_name("surgery_only", True), tables(content))


if __name__ == "__main__":
    main()
