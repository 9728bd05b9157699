"""Accuracy compared with Torch-Pruning and ModelOpt: CIFAR-10, 50 % and 35 % of the MACs left, equal training.

    python -m benchmarks.accuracy [--quick] [--full] [--data FOLDER] [--seeds 3] [--workers 2] [--only NAME]

ResNet-20, with `--full` also ResNet-56. Every method reads 300 batches of 64 images in total: the batches that its
search does not use are used for fine-tuning, which is the same code for all methods, in bf16 mixed precision. Each
method is run with and without the dense network as teacher (in fine-tuning, and in our searches), to separate the gain
of the search from that of the teacher. The settings were chosen on held-out training images (`--validate`); the table
is measured on 5000 test images. `--quick` runs four methods with one seed, one budget and a quarter of the steps.

An interrupted run resumes where it stopped. `--data` is a folder that contains cifar10/ and models/, or torchvision's
CIFAR10 folder; `python -m benchmarks.dense` trains the dense network if there is none.
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
from compress.data import derive_seed
from compress.progress import ProgressDisplay
from compress.recipe import EngineConfig, Finetune
from compress.surgery import Plan
from compress.training import Classification, Engine, FineTuneJob, fine_tune

from . import fastnas, methods, results, torch_pruning_methods
from .cifar import make_loaders
from .models import load_cifar_resnet
from .zoo import count_macs

STEPS = 300  # batches in total, for search and fine-tuning
SEARCH_STEPS = 60  # batches of a search that trains
ENGINE = {"precision": "bf16", "channels_last": True}
# At this weight the gradient of the distillation loss is about twice that of the task.
WITH_TEACHER: dict[str, Any] = {"lr": 0.01, "distill": {"temperature": 4, "weight": 8}}
WITHOUT_TEACHER: dict[str, Any] = {"lr": 0.02}
# The learning rate stays constant in the search; fine-tuning starts at the same rate and decays it.
TRAINED_SEARCH = {"epochs": SEARCH_STEPS, "schedule": "constant"}
# Each step reads two batches. With so few steps the controller needs a larger learning rate than the paper's.
APS: dict[str, Any] = {
    "method": "aps",
    "schedule": "constant",
    "epochs": SEARCH_STEPS // 2,
    "first_stage": 0.2,
    "settle": 0.5,
    "controller": {"lr": 0.01},
}
APS_METHODS = {f"aps {name}": {**APS, "sharing": name} for name in ("ordinal", "independent", "transitionary")}
OURS: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude"},
    "taylor": {"method": "taylor", "epochs": torch_pruning_methods.TAYLOR_BATCHES},
    "bayesnas": {"method": "bayesnas", **TRAINED_SEARCH},
    "netslim": {"method": "netslim", **TRAINED_SEARCH},
    "rarts": {"method": "rarts", **TRAINED_SEARCH, "epochs": SEARCH_STEPS // 2},  # each step reads two batches
    **APS_METHODS,
}
QUICK_METHODS = ("taylor", "netslim", "tp magnitude", "tp group norm")
BUDGETS = (50, 35)
TEACHERS = ("taught", "alone")  # with and without the teacher, as written in the rows
STAGES = ("search", "slice", "finetune")
COLUMNS = ("method", "after the cut, %", "fine-tuned, %", "parameters left, %", "seeds")
COLUMNS += tuple(f"{stage}, s" for stage in STAGES)
SUMMARY_COLUMNS = ("network", "MACs left", "teacher", "our best, fine-tuned", "ours, right after the cut")
SUMMARY_COLUMNS += ("best rival, fine-tuned", "rival, right after the cut")


class Bench:
    """Dense network, data, training and evaluation shared by all methods."""

    def __init__(self, network: str, seed: int, options: Namespace) -> None:
        torch.set_num_threads(1)
        self.seed, self.step_divisor = seed, 4 if options.quick else 1
        self.train, val = make_loaders(options.data, options.validate)
        self.task = Classification(self.train, val)
        self.dense = load_cifar_resnet(network, options.data).to(memory_format=torch.channels_last)
        self.engine = Engine(torch.device("cpu"), seed, ProgressDisplay(quiet=True), config=EngineConfig(**ENGINE))

    def accuracy(self, model: nn.Module) -> float:
        """Return the accuracy on the evaluation images."""
        return self.engine.evaluate(self.task, model)["accuracy"]

    def fine_tune_(self, model: nn.Module, plan: Plan, steps: int, settings: dict[str, Any]) -> None:
        """Train the model in place, without evaluation, so that the evaluation images select no weights."""
        config = Finetune.model_validate({**settings, "epochs": f"{steps} steps"})
        with self.engine.stage("finetune"):
            job = FineTuneJob(model, self.dense.eval(), plan, config, self.engine, steps)
            fine_tune(job, Classification(self.train), self.train)


def run_trial(trial: methods.Trial) -> methods.TrialRow:
    """Prune, evaluate, fine-tune and evaluate again."""
    name, seed, options = trial
    network, percent_left, teacher, method = name.split(" ", 3)
    fraction_left = int(percent_left[:-1]) / 100
    training = WITH_TEACHER if teacher == "taught" else WITHOUT_TEACHER
    bench = Bench(network, seed, options)
    if method in OURS:
        compact, plan, cost = prune_with_ours(method, bench, fraction_left, training)
    else:
        torch.manual_seed(derive_seed(seed, method))
        prune = fastnas.prune if method in fastnas.METHODS else torch_pruning_methods.prune
        search_steps = SEARCH_STEPS // bench.step_divisor
        compact, cost = prune(method, copy.deepcopy(bench.dense), fraction_left, bench.task, search_steps, bench.engine)
        plan = Plan({}, {})
    accuracy_after_cut = bench.accuracy(compact)
    finetune_steps = STEPS // bench.step_divisor - cost.batches
    bench.fine_tune_(compact, plan, finetune_steps, training)
    example = torch.randn(1, 3, 32, 32)
    return {
        "method": name,
        "seed": seed,
        "sliced": accuracy_after_cut,
        "tuned": bench.accuracy(compact),
        "macs": count_macs(compact, example) / count_macs(bench.dense, example),
        "params": _num_parameters(compact) / _num_parameters(bench.dense),
        "widths": [len(kept) for kept in plan.keep.values()],
        "batches": {"search": cost.batches, "finetune": finetune_steps},
        "seconds": {
            "search": round(cost.search_seconds, 2),
            "slice": round(cost.slice_seconds, 2),
            "finetune": bench.engine.seconds["finetune"],
        },
    }


def _num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def prune_with_ours(
    method: str, bench: Bench, fraction_left: float, training: dict[str, Any]
) -> tuple[nn.Module, Plan, methods.PruningCost]:
    """Return the compact network before fine-tuning, its plan and the cost of the search."""
    search, batches = dict(OURS[method]), 0
    if "epochs" in search:
        steps = search["epochs"] // bench.step_divisor
        reads_pairs = method == "rarts" or method in APS_METHODS
        batches, search["epochs"] = steps * (2 if reads_pairs else 1), f"{steps} steps"
    if "schedule" in search:
        search |= training
    recipe = {
        "target": {"channels": True, "round_to": 1},  # as the rivals
        "budget": {"macs": fraction_left},
        "search": search,
        "engine": ENGINE,
        "seed": bench.seed,
    }
    start = time.perf_counter()
    pruned = compress.prune(bench.dense, recipe, train=bench.train, device="cpu", quiet=True)
    stage_seconds = pruned.report.seconds
    search_seconds = stage_seconds.get("search", 0.0)
    slice_seconds = time.perf_counter() - start - search_seconds - stage_seconds.get("timing", 0.0)
    return pruned.model, pruned.plan, methods.PruningCost(batches, search_seconds, slice_seconds)


Setting = tuple[str, str, str]  # network, percent of the MACs left, teacher
MethodRows = dict[str, list[dict[str, Any]]]  # rows of all seeds by method


def rows_by_setting(content: dict[str, Any]) -> list[tuple[Setting, MethodRows]]:
    """Group the rows by setting and method; within a setting, sort the methods by accuracy, best first."""
    grouped: dict[Setting, MethodRows] = {}
    for row in content["rows"]:
        network, percent_left, teacher, method = row["method"].split(" ", 3)
        grouped.setdefault((network, percent_left, teacher), {}).setdefault(method, []).append(row)
    ordered = sorted(grouped.items(), key=lambda item: (item[0][0], -int(item[0][1][:-1]), TEACHERS.index(item[0][2])))
    by_accuracy = lambda item: -mean(row["tuned"] for row in item[1])  # noqa: E731
    return [(setting, dict(sorted(method_rows.items(), key=by_accuracy))) for setting, method_rows in ordered]


def best_of_each_side(method_rows: MethodRows) -> list[str]:
    """Return our best method and the best rival; an empty string where a side has no rows."""
    return [next((method for method in method_rows if (method in OURS) is ours), "") for ours in (True, False)]


def summary(content: dict[str, Any]) -> results.ResultTable:
    """Compare our best method with the best rival, as shown in the README.

    Bold: ahead by more than the larger standard deviation of the two.
    """
    lines = []
    for (network, percent_left, teacher), method_rows in rows_by_setting(content):
        if not all(best := best_of_each_side(method_rows)):
            continue
        accuracies = [
            [methods.format_percent([row[key] for row in method_rows[method]]) for key in ("sliced", "tuned")]
            for method in best
        ]
        values = [[row["tuned"] for row in method_rows[method]] for method in best]
        spread = max(stdev(v) if len(v) > 1 else math.inf for v in values)
        lead = mean(values[0]) - mean(values[1])
        teacher_name = "the dense network" if teacher == "taught" else "none"
        line = [network.replace("resnet", "ResNet-"), percent_left, teacher_name]
        for (after_cut, tuned), method, ahead in zip(accuracies, best, (lead > spread, -lead > spread), strict=True):
            bold = "**" * ahead
            line += [f"{bold}{tuned}{bold} ({method})", after_cut]
        lines.append(line)
    return results.ResultTable(SUMMARY_COLUMNS, lines)


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the summary and one table per setting, with the best method of each side in bold."""
    all_tables = [summary(content)]
    for (network, percent_left, teacher), method_rows in rows_by_setting(content):
        best, lines = best_of_each_side(method_rows), []
        for method, rows in method_rows.items():
            after_cut, tuned, params = (
                methods.format_percent([row[key] for row in rows]) for key in ("sliced", "tuned", "params")
            )
            seconds = [f"{mean(row['seconds'][stage] for row in rows):.1f}" for stage in STAGES]
            bold = "**" * (method in best)
            lines.append([f"{bold}{method}{bold}", after_cut, f"{bold}{tuned}{bold}", params, str(len(rows)), *seconds])
        training = "the dense network as teacher" if teacher == "taught" else "no teacher"
        all_tables.append(
            results.ResultTable(COLUMNS, lines, f"{network}, {percent_left} of the MACs left, {training}")
        )
    return [*all_tables, *_width_tables(content)]


def _width_tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the widths that APS chose, by depth; no table without rows."""
    rows = [row for row in content["rows"] if row.get("widths") and row["method"].split(" ", 3)[3] in APS_METHODS]
    lines = [
        [row["method"].split(" ", 3)[3], str(row["seed"]), *map(str, row["widths"])]
        for row in sorted(rows, key=lambda row: (row["method"], row["seed"]))
    ]
    blocks = [f"{stage}.{block}" for stage in (1, 2, 3) for block in range(3)]
    title = (
        "Inner channels that APS keeps in the blocks of ResNet-20 at 50 % (dense: 16, 32 and 64 in the three stages)"
    )
    return [results.ResultTable(("method", "seed", *blocks), lines, title)] if lines else []


def main() -> None:
    parser = methods.make_parser(__doc__, workers=2)
    parser.add_argument("--quick", action="store_true", help="four methods, one seed, one budget, few steps")
    parser.add_argument("--full", action="store_true", help="also run ResNet-56")
    options = parser.parse_args()
    options.seeds = 1 if options.quick else options.seeds
    file = results.result_name("accuracy_validation" if options.validate else "accuracy", options.quick)
    rows: list[dict[str, Any]] = [] if options.quick else results.load(file).get("rows", [])
    settings = {
        "batch": 64,
        "batches": STEPS,
        "search": SEARCH_STEPS,
        "ours": OURS,
        "taught": WITH_TEACHER,
        "alone": WITHOUT_TEACHER,
    }
    networks = ["resnet20"] + ["resnet56"] * options.full
    chosen = QUICK_METHODS if options.quick else (*OURS, *torch_pruning_methods.METHODS, *fastnas.METHODS)
    limit = 1 if options.quick else None
    names = [
        f"{network} {percent_left}% {teacher} {method}"
        for network, percent_left, teacher, method in product(networks, BUDGETS[:limit], TEACHERS[:limit], chosen)
        if method not in APS_METHODS or (network, percent_left, teacher) == ("resnet20", 50, "taught")
    ]
    for row in methods.run_missing_trials(run_trial, names, options, list(rows)):
        rows.append(row)
        print(row, flush=True)
        results.save(file, settings | {"rows": rows})
    results.publish(file, tables({"rows": rows}))


if __name__ == "__main__":
    main()
