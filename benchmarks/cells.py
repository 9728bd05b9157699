"""Cells found on CIFAR-10 in the space of NATS-Bench, with their published accuracy; cost of a step of a supernet.

    python -m benchmarks.cells [--quick] [--seeds 5] [--steps 600] [--data FOLDER]

Each search trains a small supernet (8 channels, one cell per stage) on images of 16 x 16 pixels. The cell that it
chooses is looked up in the table of NATS-Bench, where it was trained for 200 epochs. Trials are saved one by one: a run
that is stopped continues where it was. `random` draws each operation uniformly. The cost of a step is measured in
one process, all searches in alternation.
"""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.budget import Operations
from compress.cells import Genotype, nats_network
from compress.graph import Groups
from compress.recipe import Timing
from compress.search import Job, search_class

from . import data, results

CHANNELS, CELLS_PER_STAGE, SIZE, BATCH, IMAGES = 8, 1, 16, 32, 8000
TRAIN: dict[str, Any] = {"lr": 0.025, "momentum": 0.9, "weight_decay": 5e-4, "clip": 5.0}
ALPHA: dict[str, Any] = {"lr": 3e-3}  # ten times that of the papers, because the search is much shorter
BAYESNAS: dict[str, Any] = {**TRAIN, "lr": 0.1, "weight_decay": 1e-4, "schedule": "constant", "samples": 256}
SEARCHES: dict[str, dict[str, Any]] = {
    "rarts": {"method": "rarts", **TRAIN, "alpha": ALPHA},
    "rarts fused": {"method": "rarts", "update": "fused", **TRAIN, "alpha": ALPHA},
    "darts1": {"method": "darts1", **TRAIN, "alpha": ALPHA},
    "darts2": {"method": "darts2", **TRAIN, "alpha": ALPHA},
    "milenas": {"method": "milenas", **TRAIN, "alpha": ALPHA},
    "bayesnas": {"method": "bayesnas", **BAYESNAS},
    "bayesnas, gamma 0.001": {"method": "bayesnas", **BAYESNAS, "gamma": 1e-3},  # leaves all edges on
    "random": {"method": "random"},
}
THESIS = {"darts1": (59.84, 1.0), "darts2": (65.38, 1.0), "rarts": (88.52, 0.0)}  # table 3.3: accuracy, share of skips
TRIALS = results.FOLDER / "cells_trials.json"


def load_images(folder: Path, count: int) -> tuple[Tensor, Tensor]:
    """Return training images of CIFAR-10 at half of their resolution, and their labels."""
    images, labels = data.load_cifar10(folder, "train", count)
    return F.avg_pool2d(images, 32 // SIZE), labels


def published_accuracy(folder: Path) -> dict[str, float]:
    """Return the accuracy on CIFAR-10 of every cell of NATS-Bench, in percent.

    Raises:
        FileNotFoundError: `folder` has no nats_bench/topology.csv.
    """
    with (folder / "nats_bench" / "topology.csv").open(encoding="utf-8") as file:
        return {row["architecture"]: float(row["cifar10"]) for row in csv.DictReader(file)}


def rank_in_space(accuracy: float, published: dict[str, float]) -> float:
    """Return the fraction of all cells with a lower accuracy."""
    return mean(other < accuracy for other in published.values())


def search_cell(name: str, seed: int, steps: int, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Search a cell and return its string and the time that the search took."""
    torch.manual_seed(seed)
    search = {**SEARCHES[name]} | ({"epochs": f"{steps} steps"} if name != "random" else {})
    recipe = {"target": {"operations": True}, "search": search, "seed": seed, "timing": {"repeats": 3}}
    loader = DataLoader(TensorDataset(images, labels), BATCH, shuffle=True, drop_last=True)
    start = time.process_time()
    pruned = compress.prune(nats_network(CHANNELS, CELLS_PER_STAGE, 10), recipe, train=loader, quiet=True)
    seconds = time.process_time() - start
    assert pruned.genotype is not None
    losses = [entry[key] for entry in pruned.report.history for key in ("task", "auxiliary") if key in entry]
    return {
        "search": name,
        "seed": seed,
        "steps": steps,
        "cell": str(pruned.genotype),
        "cpu_seconds": round(seconds, 1),
        "last_loss": losses[-1] if losses else None,
    }


def measure_steps(repeats: int) -> list[dict[str, Any]]:
    """Return the median time of a step of each search, relative to darts1, and its peak memory."""
    torch.manual_seed(0)
    batch = (torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(0, 10, (BATCH,)))
    steps = {}
    for name, settings in SEARCHES.items():
        if name == "random":
            continue
        model = nats_network(CHANNELS, CELLS_PER_STAGE, 10).train()
        recipe = compress.Recipe.load({"target": {"operations": True}, "search": {**settings, "epochs": "1000 steps"}})
        operations = Operations(model, batch[0], Timing(repeats=3))
        job = Job(model, Groups.empty(), compress.Classification(), 1000, operations=operations)
        search = search_class(recipe.search.method, operations=True)(recipe.search, job)
        steps[name] = (search, batch if search.batches_per_step == 1 else (batch, (batch[0].clone(), batch[1].clone())))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, (search, inputs) in steps.items():
            start = time.process_time()
            search.step(inputs)
            if repeat:
                times[name].append(time.process_time() - start)
    rows = []
    for name, (search, inputs) in steps.items():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            search.step(inputs)
        rows.append({"search": name, "seconds": median(times[name]), "peak_mb": _peak_memory(profiler)})
    return rows


def _peak_memory(profiler: Any) -> float:
    """Return the largest sum of allocations since the start, in megabytes."""
    total = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return round(peak / 2**20, 1)


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Build the tables from the content of results/cells.json."""
    rows = []
    for name in SEARCHES:
        trials = [trial for trial in content["trials"] if trial["search"] == name]
        if not trials:
            continue
        accuracies, skips = ([trial[key] for trial in trials] for key in ("accuracy", "skips"))
        spread = f" ± {stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
        printed = f"{THESIS[name][0]:.2f}, {THESIS[name][1]:.0%}" if name in THESIS else "-"
        rows.append(
            [
                name,
                f"{mean(accuracies):.2f}{spread}",
                f"{min(accuracies):.2f} to {max(accuracies):.2f}",
                f"{mean(trial['better_than'] for trial in trials):.0%}",
                f"{mean(skips):.0%}",
                printed,
                str(len(trials)),
                f"{mean(trial['cpu_seconds'] for trial in trials):.0f} s",
            ]
        )
    columns = [
        "search",
        "accuracy",
        "range",
        "better than, of all cells",
        "skips",
        "thesis: accuracy, skips",
        "seeds",
        "CPU",
    ]
    title = f"{content['steps']} steps of {BATCH} images of {SIZE} x {SIZE}; published accuracy on CIFAR-10 in percent"
    found = results.ResultTable(columns, rows, title)
    base = next((row["seconds"] for row in content["cost"] if row["search"] == "darts1"), 1.0)
    cost = results.ResultTable(
        ["search", "time of a step, darts1 = 1", "peak memory of a step"],
        [[row["search"], f"{row['seconds'] / base:.2f}", f"{row['peak_mb']:.1f} MB"] for row in content["cost"]],
        "Cost of a step of the supernet (bayesnas reads one batch, the others two)",
    )
    cells = results.ResultTable(
        ["search", "seed", "cell", "accuracy"],
        [[t["search"], str(t["seed"]), f"`{t['cell']}`", f"{t['accuracy']:.2f}"] for t in content["trials"]],
        "Every cell",
    )
    lengths = [
        [t["search"], str(t["steps"]), str(t["seed"]), f"`{t['cell']}`", f"{t['accuracy']:.2f}", f"{t['skips']:.0%}"]
        for t in content.get("other_lengths", [])
    ]
    other = results.ResultTable(
        ["search", "steps", "seed", "cell", "accuracy", "skips"], lengths, "Searches of other lengths"
    )
    return [found, cost, cells, *([other] if lengths else [])]


def main() -> None:
    parser = results.make_parser(__doc__, data=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    found = [name for name in SEARCHES if name != "rarts fused"]  # of which only the cost is measured
    parser.add_argument("--only", nargs="+", choices=[*SEARCHES], default=found)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds, steps, count = (1, 4, 512) if options.quick else (options.seeds, options.steps, IMAGES)
    accuracy = published_accuracy(options.data)
    images, labels = load_images(options.data, count)
    saved = json.loads(TRIALS.read_text()) if TRIALS.exists() and not options.quick else []
    trials = [trial for trial in saved if trial["steps"] == steps]
    others = [trial for trial in saved if trial["steps"] != steps]
    for seed in range(seeds):
        for name in options.only:
            if any(t["search"] == name and t["seed"] == seed for t in trials):
                continue
            trial = search_cell(name, seed, steps, images, labels)
            skips = Genotype.from_string(trial["cell"]).normal.share_of("skip_connect")
            trial |= {"accuracy": accuracy[trial["cell"]], "skips": skips}
            trial["better_than"] = rank_in_space(trial["accuracy"], accuracy)
            trials.append(trial)
            print(trial, flush=True)
            if not options.quick:
                TRIALS.write_text(json.dumps([*others, *trials], indent=1) + "\n", encoding="utf-8")
    trials.sort(key=lambda trial: ([*SEARCHES].index(trial["search"]), trial["seed"]))
    cost = measure_steps(2 if options.quick else 15)
    content = {"steps": steps, "trials": trials, "other_lengths": others, "cost": cost}
    name = f"cells{results.QUICK_SUFFIX * options.quick}"
    results.save(name, content)
    results.publish(name, tables(content))


if __name__ == "__main__":
    main()
