"""RARTS and its rivals on CIFAR-10: ResNet-20, half of its multiply-adds left, right after the cut and fine-tuned.

    python -m benchmarks.cifar [--quick] [--data FOLDER] [--seeds 3] [--workers 2]

Every search reads the same number of batches, and every compact network is fine-tuned alike, with the dense one as its
teacher; a search that trains has that teacher, too. Methods on pairs (rarts, darts1, milenas) make half as many steps,
on pairs of batches. `all steps`: the same total, spent on fine-tuning as far as the method leaves it. Fixed gamma is l1
of that strength, auto the pull that follows from the budget.

Settings were chosen on images of the training split that are not trained on (`--validate` measures there); the table is
measured on test images that no choice has seen. A run that was stopped goes on where it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import compress

from . import data, methods, results
from .models import cifar_resnet

BATCH, SEARCH, TUNE = 64, 200, 300  # batches that a search and a fine-tuning read
TEACHER = {"temperature": 4, "weight": 8}
TRAINED = {"lr": 0.02, "distill": TEACHER}
PAIRED = TRAINED | {"epochs": f"{SEARCH // 2} steps"}
JOINT = TRAINED | {"epochs": f"{SEARCH} steps"}
FIXED = {"ranking": "cost"}
METHODS: dict[str, dict[str, Any]] = {
    "random": {"method": "random"},
    "magnitude": {"method": "magnitude"},
    "taylor": {"method": "taylor", "epochs": f"{SEARCH} steps"},
    "magnitude, all steps": {"method": "magnitude"},
    "taylor, all steps": {"method": "taylor", "epochs": "50 steps"},
    "netslim, fixed": JOINT | FIXED | {"method": "netslim", "gamma": 1e-3},
    "darts1, fixed": PAIRED | FIXED | {"method": "darts1", "gamma": 1e-3},
    "milenas, fixed": PAIRED | FIXED | {"method": "milenas", "gamma": 1e-3},
    "rarts, fixed": PAIRED | FIXED | {"method": "rarts", "gamma": 1e-3},
    "bayesnas, fixed": JOINT | {"method": "bayesnas", "gamma": 1e-2, "penalty": "macs"},
    "netslim, auto": JOINT | {"method": "netslim"},
    "darts1, auto": PAIRED | {"method": "darts1"},
    "milenas, auto": PAIRED | {"method": "milenas"},
    "rarts, auto": PAIRED | {"method": "rarts"},
    "bayesnas, auto": JOINT | {"method": "bayesnas"},
}
MORE = {"magnitude, all steps": SEARCH, "taylor, all steps": SEARCH - 50}  # steps that go to fine-tuning instead


QUICK = ("magnitude", "netslim, auto", "rarts, auto")


def recipe(name: str, seed: int, quick: bool) -> dict[str, Any]:
    tune = {"epochs": f"{TUNE + MORE.get(name, 0)} steps", "lr": 0.01, "distill": TEACHER, "best": False}
    search = dict(METHODS[name])
    if quick:
        tune["epochs"] = "20 steps"
        search |= {"epochs": "10 steps"} if "epochs" in search else {}
    return {
        "budget": {"macs": "50%"},
        "search": search,
        "finetune": tune,
        "timing": {"repeats": 3},
        "seed": seed,
    }


def loaders(folder: Path, validate: bool, quick: bool = False) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training batches with crops and flips, and 5000 images to measure on; a tenth of both to be quick."""
    part = 10 if quick else 1
    train = data.Flipped(*data.cifar10(folder, "train", 20000 // part))
    count = 5000 // part
    held = data.cifar10(folder, "train", count, 45000) if validate else data.cifar10(folder, "test", count)
    return DataLoader(train, BATCH, shuffle=True, drop_last=True), DataLoader(TensorDataset(*held), 500)


def one(job: methods.Job) -> methods.Row:
    """A whole pruning."""
    name, seed, options = job
    torch.set_num_threads(1)
    train, val = loaders(options.data, options.validate, options.quick)
    dense = cifar_resnet("resnet20", options.data).to(memory_format=torch.channels_last)
    report = compress.prune(
        dense, recipe(name, seed, options.quick), train=train, val=val, device="cpu", quiet=True
    ).report
    return {
        "method": name,
        "seed": seed,
        "dense": report.dense.metrics["accuracy"],
        "sliced": report.sliced["accuracy"],
        "tuned": report.pruned.metrics["accuracy"],
        "macs": report.pruned.macs / report.dense.macs,
        "seconds": {stage: round(seconds, 1) for stage, seconds in report.seconds.items()},
    }


def main() -> None:
    parser = methods.options_of(__doc__, workers=2)
    parser.add_argument("--quick", action="store_true", help="three methods, one seed, few steps")
    options = parser.parse_args()
    options.seeds = 1 if options.quick else options.seeds
    file = results.named("cifar_validation" if options.validate else "cifar", options.quick)
    rows: list[dict[str, Any]] = [] if options.quick else results.load(file).get("rows", [])
    settings = {"batch": BATCH, "search_batches": SEARCH, "finetune_batches": TUNE, "methods": METHODS, "more": MORE}
    for row in methods.rows_of(one, QUICK if options.quick else METHODS, options, list(rows)):
        rows.append(row)
        print(row, flush=True)
        results.save(file, settings | {"rows": rows})
    results.show(file, sheets({"rows": rows}))


def sheets(content: dict[str, Any]) -> list[results.Sheet]:
    lines = []
    for name in METHODS:
        if mine := [row for row in content["rows"] if row["method"] == name]:
            measured = [methods.percents([row[key] for row in mine]) for key in ("sliced", "tuned")]
            lines.append([name, *measured, str(len(mine)), methods.spent(mine)])
    dense = f"dense {100 * content['rows'][0]['dense']:.1f} %"
    head = ("method", "right after the cut, %", "fine-tuned, %", "seeds", "seconds of search and fine-tuning")
    return [results.Sheet(head, lines, f"ResNet-20, 50 % of the MACs left; {dense}")]


if __name__ == "__main__":
    main()
