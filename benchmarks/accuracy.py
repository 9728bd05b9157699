"""Accuracy against Torch-Pruning and ModelOpt: CIFAR-10, half and 35 % of the multiply-adds left, equal training.

    python -m benchmarks.accuracy [--quick] [--full] [--data FOLDER] [--seeds 3] [--workers 2] [--only NAME]

ResNet-20 (with `--full` also ResNet-56), 300 batches of 64 in all: what a method's search does not read goes to its
fine-tuning, which is the same code for all, in bf16 mixed precision. Each method with the dense network as teacher (of
fine-tuning; of our searches, too) and without, so that the gain of the search is not that of the teacher. Settings were
chosen on training images that are not trained on (`--validate`); the table is measured on 5000 test images. `--quick`:
one seed, one budget, a quarter of the steps, the methods that matter most.

A run that was stopped goes on where it was. `--data` is a folder with cifar10/ and models/, or the one where
torchvision keeps its CIFAR10; `python -m benchmarks.dense` trains the dense network where there is none.
"""

from __future__ import annotations

import copy
import math
import time
from argparse import Namespace
from itertools import product
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn

import compress
from compress.compute import EngineConfig
from compress.display import Display
from compress.engine import Engine
from compress.finetune import finetune
from compress.loading import derived
from compress.plan import Plan
from compress.recipe import Finetune
from compress.task import Classification

from . import fastnas, methods, results, rivals
from .cifar import loaders
from .models import cifar_resnet
from .zoo import count_macs

STEPS, SEARCH = 300, 60  # batches: of everything, and of them those that a search trains on
ENGINE = {"precision": "bf16", "channels_last": True}
TAUGHT: dict[str, Any] = {"lr": 0.01, "distill": {"temperature": 4, "weight": 8}}  # whose gradient is twice the task's
ALONE: dict[str, Any] = {"lr": 0.02}
TRAINED = {"epochs": SEARCH, "schedule": "constant"}  # fine-tuning goes on at the rate, and lowers it
OURS: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude"},
    "taylor": {"method": "taylor", "epochs": rivals.READ},
    "bayesnas": {"method": "bayesnas", **TRAINED},
    "netslim": {"method": "netslim", **TRAINED},
    "rarts": {"method": "rarts", **TRAINED, "epochs": SEARCH // 2},  # on pairs of batches
}
QUICK = ("taylor", "netslim", "tp magnitude", "tp group norm")
BUDGETS, TEACHERS = (50, 35), ("taught", "alone")
STAGES = ("search", "slice", "finetune")
COLUMNS = ("method", "after the cut, %", "fine-tuned, %", "parameters left, %", "seeds")
COLUMNS += tuple(f"{stage}, s" for stage in STAGES)
SUMMARY = ("network", "MACs left", "teacher", "our best, fine-tuned", "the same one right after the cut")
SUMMARY += ("best rival, fine-tuned", "that rival right after the cut")


class Bench:
    """A dense network, its data, and the training and measuring that all methods share."""

    def __init__(self, network: str, seed: int, options: Namespace) -> None:
        torch.set_num_threads(1)
        self.seed, self.scale = seed, 4 if options.quick else 1
        self.train, val = loaders(options.data, options.validate)
        self.task = Classification(self.train, val)
        self.dense = cifar_resnet(network, options.data).to(memory_format=torch.channels_last)
        self.engine = Engine(torch.device("cpu"), seed, Display(quiet=True), config=EngineConfig(**ENGINE))

    def accuracy(self, model: nn.Module) -> float:
        return self.engine.evaluate(self.task, model)["accuracy"]

    def tune(self, model: nn.Module, plan: Plan, steps: int, settings: dict[str, Any]) -> None:
        """Train in place. Nothing is measured on the way: no weights are chosen by the images measured on."""
        config = Finetune.model_validate({**settings, "epochs": f"{steps} steps"})
        with self.engine.stage("finetune"):
            finetune(model, self.dense.eval(), plan, Classification(self.train), self.train, config, self.engine, steps)


def one(job: methods.Job) -> methods.Row:
    """Cut, measure, train, measure."""
    name, seed, options = job
    network, left, taught, method = name.split(" ", 3)
    part, training = int(left[:-1]) / 100, TAUGHT if taught == "taught" else ALONE
    bench = Bench(network, seed, options)
    if method in OURS:
        small, plan, spent = ours(method, bench, part, training)
    else:
        torch.manual_seed(derived(seed, method))
        cut = fastnas.prune if method in fastnas.METHODS else rivals.prune
        small, spent = cut(method, copy.deepcopy(bench.dense), part, bench.task, SEARCH // bench.scale, bench.engine)
        plan = Plan({}, {})
    sliced = bench.accuracy(small)
    rest = STEPS // bench.scale - spent["batches"]
    bench.tune(small, plan, rest, training)
    example = torch.randn(1, 3, 32, 32)
    return {
        "method": name,
        "seed": seed,
        "sliced": sliced,
        "tuned": bench.accuracy(small),
        "macs": count_macs(small, example) / count_macs(bench.dense, example),
        "params": _size(small) / _size(bench.dense),
        "batches": {"search": spent["batches"], "finetune": rest},
        "seconds": {k: round(spent[k], 2) for k in STAGES[:2]} | {"finetune": bench.engine.seconds["finetune"]},
    }


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def ours(method: str, bench: Bench, left: float, training: dict[str, Any]) -> tuple[nn.Module, Plan, dict[str, Any]]:
    """The compact network before fine-tuning, its plan, and what was spent, in batches and seconds."""
    search, read = dict(OURS[method]), 0
    if "epochs" in search:
        read = (search["epochs"] if method != "rarts" else SEARCH) // bench.scale
        search["epochs"] = f"{search['epochs'] // bench.scale} steps"
    if "schedule" in search:
        search |= training
    recipe = {"budget": {"macs": left}, "search": search, "engine": ENGINE, "seed": bench.seed}
    start = time.perf_counter()
    pruned = compress.prune(bench.dense, recipe, train=bench.train, device="cpu", quiet=True)
    seconds = pruned.report.seconds
    spent = {"batches": read, "search": seconds.get("search", 0.0)}
    rest = time.perf_counter() - start - spent["search"] - seconds.get("timing", 0.0)
    return pruned.model, pruned.plan, spent | {"slice": rest}


Block = tuple[tuple[str, str, str], dict[str, list[dict[str, Any]]]]  # network, budget, training; rows by method


def blocks(content: dict[str, Any]) -> list[Block]:
    """The rows of each network, budget and kind of training, the best method first."""
    found: dict[tuple[str, str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in content["rows"]:
        network, left, taught, method = row["method"].split(" ", 3)
        found.setdefault((network, left, taught), {}).setdefault(method, []).append(row)
    ordered = sorted(found.items(), key=lambda b: (b[0][0], -int(b[0][1][:-1]), TEACHERS.index(b[0][2])))
    best = lambda cell: -mean(row["tuned"] for row in cell[1])  # noqa: E731
    return [(block, dict(sorted(cells.items(), key=best))) for block, cells in ordered]


def firsts(cells: dict[str, Any]) -> list[str]:
    """The best of ours and the best of all others."""
    return [next((method for method in cells if (method in OURS) is mine), "") for mine in (True, False)]


def summary(content: dict[str, Any]) -> results.Sheet:
    """The best of ours against the best of theirs: what the README shows. Bold: ahead by more than either's spread."""
    lines = []
    for (network, left, taught), cells in blocks(content):
        if not all(best := firsts(cells)):
            continue
        pairs = [[methods.percents([r[key] for r in cells[m]]) for key in ("sliced", "tuned")] for m in best]
        values = [[row["tuned"] for row in cells[m]] for m in best]
        spread = max(stdev(v) if len(v) > 1 else math.inf for v in values)
        ahead = mean(values[0]) - mean(values[1])
        said = [network.replace("resnet", "ResNet-"), left, "the dense network" if taught == "taught" else "none"]
        for (cut, tuned), method, clear in zip(pairs, best, (ahead > spread, -ahead > spread), strict=True):
            bold = "**" * clear
            said += [f"{bold}{tuned}{bold} ({method})", cut]
        lines.append(said)
    return results.Sheet(SUMMARY, lines)


def sheets(content: dict[str, Any]) -> list[results.Sheet]:
    """The best, then a table for each network, budget and kind of training, in which the best of each side are bold."""
    found = [summary(content)]
    for (network, left, taught), cells in blocks(content):
        first, lines = firsts(cells), []
        for method, rows in cells.items():
            measured = [methods.percents([row[key] for row in rows]) for key in ("sliced", "tuned", "params")]
            seconds = [f"{mean(row['seconds'][stage] for row in rows):.1f}" for stage in STAGES]
            bold = "**" * (method in first)
            lines.append([f"{bold}{method}{bold}", measured[0], f"{bold}{measured[1]}{bold}", measured[2]])
            lines[-1] += [str(len(rows)), *seconds]
        how = "the dense network teaches" if taught == "taught" else "no teacher"
        found.append(results.Sheet(COLUMNS, lines, f"{network}, {left} of the MACs left, {how}"))
    return found


def main() -> None:
    parser = methods.options_of(__doc__, workers=2)
    parser.add_argument("--quick", action="store_true", help="four methods, one seed, one budget, few steps")
    parser.add_argument("--full", action="store_true", help="ResNet-56, too")
    options = parser.parse_args()
    options.seeds = 1 if options.quick else options.seeds
    file = results.named("accuracy_validation" if options.validate else "accuracy", options.quick)
    rows: list[dict[str, Any]] = [] if options.quick else results.load(file).get("rows", [])
    settings = {"batch": 64, "batches": STEPS, "search": SEARCH, "ours": OURS, "taught": TAUGHT, "alone": ALONE}
    networks = ["resnet20"] + ["resnet56"] * options.full
    chosen = QUICK if options.quick else (*OURS, *rivals.METHODS, *fastnas.METHODS)
    few = 1 if options.quick else None
    names = [
        f"{network} {left}% {taught} {method}"
        for network, left, taught, method in product(networks, BUDGETS[:few], TEACHERS[:few], chosen)
    ]
    for row in methods.rows_of(one, names, options, list(rows)):
        rows.append(row)
        print(row, flush=True)
        results.save(file, settings | {"rows": rows})
    results.show(file, sheets({"rows": rows}))


if __name__ == "__main__":
    main()
