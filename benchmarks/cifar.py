"""RARTS compared with other searches on CIFAR-10: ResNet-20, 50 % of the MACs left, right after the cut and fine-tuned.

    python -m benchmarks.cifar [--quick] [--data FOLDER] [--seeds 3] [--workers 2]

Every search reads the same number of batches, and every compact network is fine-tuned in the same way with the dense
network as teacher; searches that train use the same teacher. rarts, darts1 and milenas read two batches per step and
therefore make half as many steps. `all steps` has the same total number of batches, but uses those that the search does
not need for fine-tuning. `fixed` is an l1 penalty with a fixed gamma, `auto` is the budget regularizer.

The settings were chosen on held-out training images (`--validate` measures on them); the table is measured on test
images that were not used for any choice. An interrupted run resumes where it stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import compress

from . import data, methods, results
from .models import load_cifar_resnet

BATCH, SEARCH_BATCHES, FINETUNE_BATCHES = 64, 200, 300  # batch size; batches per search; batches per fine-tuning
TEACHER = {"temperature": 4, "weight": 8}
TRAINING = {"lr": 0.02, "distill": TEACHER}
PAIRED_STEPS = TRAINING | {"epochs": f"{SEARCH_BATCHES // 2} steps"}
JOINT_STEPS = TRAINING | {"epochs": f"{SEARCH_BATCHES} steps"}
COST_RANKING = {"ranking": "cost"}
METHODS: dict[str, dict[str, Any]] = {
    "random": {"method": "random"},
    "magnitude": {"method": "magnitude"},
    "taylor": {"method": "taylor", "epochs": f"{SEARCH_BATCHES} steps"},
    "magnitude, all steps": {"method": "magnitude"},
    "taylor, all steps": {"method": "taylor", "epochs": "50 steps"},
    "netslim, fixed": JOINT_STEPS | COST_RANKING | {"method": "netslim", "gamma": 1e-3},
    "darts1, fixed": PAIRED_STEPS | COST_RANKING | {"method": "darts1", "gamma": 1e-3},
    "milenas, fixed": PAIRED_STEPS | COST_RANKING | {"method": "milenas", "gamma": 1e-3},
    "rarts, fixed": PAIRED_STEPS | COST_RANKING | {"method": "rarts", "gamma": 1e-3},
    "bayesnas, fixed": JOINT_STEPS | {"method": "bayesnas", "gamma": 1e-2, "penalty": "macs"},
    "netslim, auto": JOINT_STEPS | {"method": "netslim"},
    "darts1, auto": PAIRED_STEPS | {"method": "darts1"},
    "milenas, auto": PAIRED_STEPS | {"method": "milenas"},
    "rarts, auto": PAIRED_STEPS | {"method": "rarts"},
    "bayesnas, auto": JOINT_STEPS | {"method": "bayesnas"},
}
EXTRA_FINETUNE_STEPS = {
    "magnitude, all steps": SEARCH_BATCHES,
    "taylor, all steps": SEARCH_BATCHES - 50,
}  # batches that the search does not use
QUICK_METHODS = ("magnitude", "netslim, auto", "rarts, auto")


def recipe(name: str, seed: int, quick: bool) -> dict[str, Any]:
    """Return the recipe of a method."""
    finetune = {
        "epochs": f"{FINETUNE_BATCHES + EXTRA_FINETUNE_STEPS.get(name, 0)} steps",
        "lr": 0.01,
        "distill": TEACHER,
        "best": False,
    }
    search = dict(METHODS[name])
    if quick:
        finetune["epochs"] = "20 steps"
        search |= {"epochs": "10 steps"} if "epochs" in search else {}
    return {
        "target": {"channels": True, "round_to": 1},
        "budget": {"macs": "50%"},
        "search": search,
        "finetune": finetune,
        "timing": {"repeats": 3},
        "seed": seed,
    }


def make_loaders(folder: Path, validate: bool, quick: bool = False) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return augmented training batches and batches of 5000 evaluation images; a tenth of both if `quick`."""
    divisor = 10 if quick else 1
    train = data.CropFlipDataset(*data.load_cifar10(folder, "train", 20000 // divisor))
    count = 5000 // divisor
    evaluation = (
        data.load_cifar10(folder, "train", count, 45000) if validate else data.load_cifar10(folder, "test", count)
    )
    return DataLoader(train, BATCH, shuffle=True, drop_last=True), DataLoader(TensorDataset(*evaluation), 500)


def run_trial(trial: methods.Trial) -> methods.TrialRow:
    """Search, prune and fine-tune with one method and seed."""
    name, seed, options = trial
    torch.set_num_threads(1)
    train, val = make_loaders(options.data, options.validate, options.quick)
    dense = load_cifar_resnet("resnet20", options.data).to(memory_format=torch.channels_last)
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
    parser = methods.make_parser(__doc__, workers=2)
    parser.add_argument("--quick", action="store_true", help="three methods, one seed, few steps")
    options = parser.parse_args()
    options.seeds = 1 if options.quick else options.seeds
    file = results.result_name("cifar_validation" if options.validate else "cifar", options.quick)
    rows: list[dict[str, Any]] = [] if options.quick else results.load(file).get("rows", [])
    settings = {
        "batch": BATCH,
        "search_batches": SEARCH_BATCHES,
        "finetune_batches": FINETUNE_BATCHES,
        "methods": METHODS,
        "more": EXTRA_FINETUNE_STEPS,
    }
    for row in methods.run_missing_trials(run_trial, QUICK_METHODS if options.quick else METHODS, options, list(rows)):
        rows.append(row)
        print(row, flush=True)
        results.save(file, settings | {"rows": rows})
    results.publish(file, tables({"rows": rows}))


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the table of all methods."""
    lines = []
    for name in METHODS:
        if rows := [row for row in content["rows"] if row["method"] == name]:
            accuracies = [methods.format_percent([row[key] for row in rows]) for key in ("sliced", "tuned")]
            lines.append([name, *accuracies, str(len(rows)), methods.mean_seconds(rows)])
    dense = f"dense {100 * content['rows'][0]['dense']:.1f} %"
    head = ("method", "right after the cut, %", "fine-tuned, %", "seeds", "search and fine-tuning, s")
    return [results.ResultTable(head, lines, f"ResNet-20, 50 % of the MACs left; {dense}")]


if __name__ == "__main__":
    main()
