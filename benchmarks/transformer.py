"""RARTS compared with other searches on a ViT: 40 % of the Q/K/V and MLP dimensions removed, or 30 % of the MACs left.

    python -m benchmarks.transformer [--quick] [--data FOLDER] [--seeds 3] [--out FOLDER]

A small ViT (width 128, 6 blocks, 4 heads, 16 tokens from a convolutional stem; benchmarks/vit.py) is first trained on
CIFAR-10, a quarter of an hour on one core, and saved in `--out`. Every search reads the same number of batches, and
every compact network is fine-tuned in the same way with the dense network as teacher; searches that train use the same
teacher. rarts reads two batches per step and makes half as many steps. `all steps` has the same total number of
batches, but uses those that the search does not need for fine-tuning. netslim and rarts use the budget regularizer.

The settings were chosen on held-out training images (`--validate` measures on them), with a ranking and a fine-tuning
learning rate per method. The table is measured on the second half of the test images, which were not used for any
choice; three rows on the first half led us to try lower learning rates. An interrupted run resumes where it stopped.
`--quick` prunes an untrained network.
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.formatting import text_bar

from . import data, methods, results, vit
from .models import cifar_vit

BATCH, SEARCH_BATCHES, FINETUNE_BATCHES = 64, 100, 100  # batch size; batches per search; batches per fine-tuning
BUDGETS = {"dims 60%": {"dims": "60%"}, "MACs 30%": {"macs": "30%"}}
TEACHER = {"temperature": 4, "weight": 8}
TRAINING = {"optimizer": "adamw", "lr": 5e-4, "weight_decay": 0.05, "distill": TEACHER}
LOW_LR = 1e-4  # of fine-tuning, except for FULL_LR_METHODS
METHODS: dict[str, dict[str, Any]] = {
    "random": {"method": "random"},
    "magnitude": {"method": "magnitude"},
    "taylor": {"method": "taylor", "epochs": f"{SEARCH_BATCHES} steps"},
    "magnitude, all steps": {"method": "magnitude"},
    "taylor, all steps": {"method": "taylor", "epochs": "50 steps"},
    "netslim": TRAINING | {"method": "netslim", "epochs": f"{SEARCH_BATCHES} steps"},
    "rarts": TRAINING | {"method": "rarts", "epochs": f"{SEARCH_BATCHES // 2} steps"},
}
EXTRA_FINETUNE_STEPS = {
    "magnitude, all steps": SEARCH_BATCHES,
    "taylor, all steps": SEARCH_BATCHES - 50,
}  # batches that the search does not use
FULL_LR_METHODS = {
    "dims 60%": [],
    "MACs 30%": ["random", "magnitude", "magnitude, all steps", "rarts"],
}  # fine-tuned at the full learning rate
MAGNITUDE_RANKING = {"dims 60%": "global", "MACs 30%": "group"}  # the best of all for `magnitude`
TRIALS = {f"{cut}: {name}": (cut, name) for cut in BUDGETS for name in METHODS}
QUICK_TRIALS = ("MACs 30%: magnitude", "MACs 30%: rarts")


def recipe(trial_name: str, seed: int, quick: bool) -> dict[str, Any]:
    """Return the recipe of a trial."""
    budget, name = TRIALS[trial_name]
    search = METHODS[name] | ({"ranking": MAGNITUDE_RANKING[budget]} if name.startswith("magnitude") else {})
    finetune = TRAINING | {"epochs": f"{FINETUNE_BATCHES + EXTRA_FINETUNE_STEPS.get(name, 0)} steps", "best": False}
    finetune |= {} if name in FULL_LR_METHODS[budget] else {"lr": LOW_LR}
    if quick:
        finetune["epochs"] = "10 steps"
        search |= {"epochs": "10 steps"} if "epochs" in search else {}
    return {
        "target": {"channels": False, "attention": True, "mlp": True, "round_to": 1},
        "budget": BUDGETS[budget],
        "search": search,
        "finetune": finetune,
        "timing": {"repeats": 3},
        "seed": seed,
    }


@cache
def load_images(folder: Path, validate: bool, quick: bool) -> tuple[TensorDataset, TensorDataset]:
    """Return the augmented training images of the dense network and 5000 evaluation images."""
    train_count, count = (1000, 500) if quick else (vit.IMAGES, 5000)
    evaluation = (
        data.load_cifar10(folder, "train", count, vit.IMAGES)
        if validate
        else data.load_cifar10(folder, "test", count, 5000)
    )
    return data.CropFlipDataset(*data.load_cifar10(folder, "train", train_count)), TensorDataset(*evaluation)


def run_trial(trial: methods.Trial) -> methods.TrialRow:
    """Search, prune and fine-tune with one method and seed."""
    name, seed, options = trial
    torch.set_num_threads(1)
    train, evaluation = load_images(options.data, options.validate, options.quick)
    dense = _load_dense(options)
    batches, val = DataLoader(train, BATCH, shuffle=True, drop_last=True), DataLoader(evaluation, 500)
    report = compress.prune(
        dense, recipe(name, seed, options.quick), train=batches, val=val, device="cpu", quiet=True
    ).report
    attention = [g for g in report.groups if g.kind == "attention"]
    return {
        "method": name,
        "seed": seed,
        "dense": report.dense.metrics["accuracy"],
        "sliced": report.sliced["accuracy"],
        "tuned": report.pruned.metrics["accuracy"],
        "params": report.pruned.params / report.dense.params,
        "macs": report.pruned.macs / report.dense.macs,
        "attention": sum(g.kept for g in attention) / sum(g.width for g in attention),
        "left": {group.name: group.kept / group.width for group in report.groups},
        "seconds": {stage: round(seconds, 1) for stage, seconds in report.seconds.items()},
    }


def _load_dense(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return cifar_vit().eval() if options.quick else vit.load_or_train(options.data, options.out)


def main() -> None:
    parser = methods.make_parser(__doc__, workers=1)
    parser.add_argument("--quick", action="store_true", help="two methods, one seed, few steps, random weights")
    parser.add_argument(
        "--out", type=Path, default=Path.home() / ".cache" / "compress", help="folder for the trained weights"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    dense = _load_dense(options)
    options.seeds = 1 if options.quick else options.seeds
    file = results.result_name("transformer_validation" if options.validate else "transformer", options.quick)
    saved = {} if options.quick else results.load(file)
    settings = {
        "batch": BATCH,
        "search_batches": SEARCH_BATCHES,
        "finetune_batches": FINETUNE_BATCHES,
        "methods": METHODS,
        "more": EXTRA_FINETUNE_STEPS,
    }
    settings |= {
        "cuts": BUDGETS,
        "training": TRAINING,
        "gentle": LOW_LR,
        "full_rate": FULL_LR_METHODS,
        "ranking": MAGNITUDE_RANKING,
        "weights": vit.weights_digest(dense),
    }
    rows: list[methods.TrialRow] = saved["rows"] if saved == saved | settings else []  # other settings: start over
    for row in methods.run_missing_trials(run_trial, QUICK_TRIALS if options.quick else TRIALS, options, list(rows)):
        rows.append(row)
        print(row, flush=True)
        results.save(file, settings | {"rows": rows})
    results.publish(file, tables({"rows": rows}))


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return one table per budget, and the kept fraction of each layer."""
    rows, all_tables = content["rows"], []
    head = ("method", "right after the cut, %", "fine-tuned, %", "parameters", "MACs", "attention", "seeds", "seconds")
    for budget in BUDGETS:
        lines = []
        for trial_name, (trial_budget, name) in TRIALS.items():
            if trial_budget == budget and (trial_rows := [r for r in rows if r["method"] == trial_name]):
                accuracies = [methods.format_percent([r[key] for r in trial_rows]) for key in ("sliced", "tuned")]
                costs = [f"{mean(r[key] for r in trial_rows):.1%}" for key in ("params", "macs", "attention")]
                lines.append([name, *accuracies, *costs, str(len(trial_rows)), methods.mean_seconds(trial_rows)])
        if lines:
            all_tables.append(results.ResultTable(head, lines, f"{budget} left; dense {rows[0]['dense']:.1%}"))
    rarts_rows = [r for r in rows if r["seed"] == 0 and TRIALS[r["method"]][1] == "rarts"]
    title = "Dimensions kept by rarts, seed 0 (as in figure 4.2 of the thesis)"
    layers = [
        [layer, *(f"{text_bar(r['left'][layer], 20)} {r['left'][layer]:.0%}" for r in rarts_rows)]
        for layer in (rarts_rows[0]["left"] if rarts_rows else ())
    ]
    return (
        [*all_tables, results.ResultTable(("layer", *(r["method"] for r in rarts_rows)), layers, title)]
        if rarts_rows
        else all_tables
    )


if __name__ == "__main__":
    main()
