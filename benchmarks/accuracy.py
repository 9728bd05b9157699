"""Accuracy against Torch-Pruning: CIFAR-10, half and 35 % of the multiply-adds left, the same total of training steps.

    python -m benchmarks.accuracy [--quick] [--full] [--data FOLDER] [--seeds 3] [--workers 2] [--only NAME]

ResNet-20 (with `--full` also ResNet-56), 500 batches of 64 in all: what a method's search does not read goes to its
fine-tuning. Each with the dense network as teacher (of fine-tuning; of our searches, too) and without, so that the gain
of the search is not that of the teacher. Fine-tuning is the same code for all. `--quick`: one seed, one budget, a fifth
of the steps, the methods that matter most.

A run that was stopped goes on where it was; the table is benchmarks/results/accuracy.md.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import torch
from rich.table import Table

import compress
from compress.display import Display
from compress.engine import Engine
from compress.finetune import finetune
from compress.loading import derived
from compress.plan import Plan
from compress.recipe import Finetune
from compress.task import Classification

from . import methods, results, rivals
from .cifar import loaders
from .models import cifar_resnet
from .zoo import count_macs

SEARCH, TUNE = 200, 300  # batches
TEACHER = {"temperature": 4, "weight": 8}
OURS: dict[str, dict[str, Any]] = {
    "random": {"method": "random"},
    "magnitude": {"method": "magnitude"},
    "taylor": {"method": "taylor", "epochs": rivals.READ},
    "netslim": {"method": "netslim", "lr": 0.02, "epochs": SEARCH},
    "bayesnas": {"method": "bayesnas", "lr": 0.02, "epochs": SEARCH},
    "rarts": {"method": "rarts", "lr": 0.02, "epochs": SEARCH // 2},  # on pairs of batches
}
QUICK = ("taylor", "netslim", "tp magnitude", "tp group norm")
BUDGETS, TEACHERS = (50, 35), (True, False)


def name_of(network: str, method: str, left: int, taught: bool) -> str:
    return f"{network} {left}% {'taught' if taught else 'alone'} {method}"


def jobs(quick: bool, full: bool) -> list[str]:
    networks = ["resnet20"] + ["resnet56"] * full
    chosen = QUICK if quick else (*OURS, *rivals.METHODS)
    return [
        name_of(*which)
        for which in product(networks, chosen, BUDGETS[:1] if quick else BUDGETS, TEACHERS[:1] if quick else TEACHERS)
    ]


def one(job: methods.Job) -> methods.Row:
    name, seed, options = job
    torch.set_num_threads(1)
    network, left, taught, method = name.split(" ", 3)
    part, teacher = int(left[:-1]) / 100, TEACHER if taught == "taught" else None
    scale = 5 if options.quick else 1
    train, val = loaders(options.data, options.validate)
    dense = cifar_resnet(network, options.data).to(memory_format=torch.channels_last)
    tune = {"lr": 0.01, "best": False} | ({"distill": teacher} if teacher else {})
    if method in OURS:
        found = _ours(method, dense, part, tune, teacher, seed, scale, train, val)
    else:
        found = _theirs(method, dense, part, tune, seed, scale, train, val)
    return {"method": name, "seed": seed, "quick": options.quick, **found}


def _ours(
    method: str, dense: Any, left: float, tune: Any, teacher: Any, seed: int, scale: int, train: Any, val: Any
) -> dict[str, Any]:
    search = dict(OURS[method])
    read = 0
    if "epochs" in search:
        search["epochs"] = f"{search['epochs'] // scale} steps"
        read = rivals.READ if method == "taylor" else SEARCH
    if teacher and "lr" in search:
        search["distill"] = teacher
    rest = (SEARCH + TUNE - read) // scale
    recipe = {
        "budget": {"macs": left},
        "search": search,
        "finetune": {**tune, "epochs": f"{rest} steps"},
        "timing": {"repeats": 3},
        "seed": seed,
    }
    report = compress.prune(dense, recipe, train=train, val=val, device="cpu", quiet=True).report
    return {
        "dense": report.dense.metrics["accuracy"],
        "sliced": report.sliced["accuracy"],
        "tuned": report.pruned.metrics["accuracy"],
        "macs": report.pruned.macs / report.dense.macs,
        "params": report.pruned.params / report.dense.params,
        "seconds": {k: round(v, 2) for k, v in report.seconds.items() if k not in ("evaluate", "timing")},
    }


def _theirs(
    method: str, dense: Any, left: float, tune: Any, seed: int, scale: int, train: Any, val: Any
) -> dict[str, Any]:
    torch.manual_seed(derived(seed, method))
    engine = Engine(torch.device("cpu"), seed, Display(quiet=True))
    task, model, example = Classification(train, val), copy.deepcopy(dense), torch.randn(1, 3, 32, 32)
    before = engine.evaluate(task, dense)["accuracy"]
    spent = rivals.prune(method, model, left, train, SEARCH // scale, 0.02)
    sliced = engine.evaluate(task, model)["accuracy"]
    rest = (SEARCH + TUNE) // scale - spent["batches"]
    config = Finetune.model_validate({**tune, "epochs": f"{rest} steps"})
    with engine.stage("finetune"):
        finetune(model, dense.eval(), Plan({}, {}), task, train, config, engine, rest)
    return {
        "dense": before,
        "sliced": sliced,
        "tuned": engine.evaluate(task, model)["accuracy"],
        "macs": count_macs(model, example) / count_macs(dense, example),
        "params": sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in dense.parameters()),
        "seconds": {k: round(spent[k], 2) for k in ("search", "slice")} | {"finetune": engine.seconds["finetune"]},
    }


def main() -> None:
    parser = methods.options_of(__doc__, workers=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    options.seeds = 1 if options.quick else options.seeds
    file = "accuracy_quick" if options.quick else "accuracy_validation" if options.validate else "accuracy"
    rows: list[dict[str, Any]] = results.load(file).get("rows", [])
    settings = {"batch": 64, "batches": SEARCH + TUNE, "ours": OURS}
    names = jobs(options.quick, options.full)
    for row in methods.rows_of(one, names, options, list(rows)):
        rows.append(row)
        print(row, flush=True)
        results.save(file, settings | {"rows": rows})
    columns = ("network", "MACs left", "teacher", "method", "after the cut", "fine-tuned", "params", "seeds", "seconds")
    table = Table(*columns)
    lines = []
    for name in sorted(names, key=lambda n: n.split(" ")[:3]):
        mine = [row for row in rows if row["method"] == name]
        if mine:
            network, left, taught, method = name.split(" ", 3)
            measured = [methods.percents([row[key] for row in mine]) for key in ("sliced", "tuned", "params")]
            taught = "yes" if taught == "taught" else "no"
            lines.append([network, left, taught, method, *measured, str(len(mine)), methods.spent(mine)])
            table.add_row(*lines[-1])
    results.console().print(table)
    results.markdown(file, columns, lines)


if __name__ == "__main__":
    main()
