"""RARTS and its rivals on a ViT: 40 % of the Q/K/V and MLP dimensions cut, right after the cut and fine-tuned.

    python -m benchmarks.transformer [--quick] [--data FOLDER] [--seeds 3] [--out FOLDER]

A small ViT (128 wide, 6 blocks, 4 heads, 16 tokens from a stem of convolutions; benchmarks/vit.py) is trained on
CIFAR-10 first, a quarter of an hour on one core, and kept in `--out`. Every search reads the same number of batches,
and every compact network is fine-tuned alike, with the dense one as its teacher; a search that trains has that teacher,
too. Rarts works on pairs of batches and makes half as many steps. `all steps`: the same total, spent on fine-tuning as
far as the method leaves it. Fixed gamma is l1 of that strength, auto the pull that follows from the budget.

Settings were chosen on images of the training split that are not trained on (`--validate` measures there), for each
method its own ranking and rate of fine-tuning. The table is measured on the second half of the test images, which no
choice has seen: three rows on the first half made us try lower rates. A run that was stopped goes on where it was.
`--quick` prunes a network that is not trained at all.
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
from compress.report import bar

from . import data, methods, results, vit
from .models import cifar_vit

BATCH, SEARCH, TUNE = 64, 100, 100  # batches that a search and a fine-tuning read
CUTS = {"dims 60%": {"dims": "60%"}, "MACs 30%": {"macs": "30%"}}  # what is left
TEACHER = {"temperature": 4, "weight": 8}
TRAINED = {"optimizer": "adamw", "lr": 5e-4, "weight_decay": 0.05, "distill": TEACHER}
GENTLE = 1e-4  # rate of fine-tuning, but for those that are better off with the full one
METHODS: dict[str, dict[str, Any]] = {
    "random": {"method": "random"},
    "magnitude": {"method": "magnitude"},
    "taylor": {"method": "taylor", "epochs": f"{SEARCH} steps"},
    "magnitude, all steps": {"method": "magnitude"},
    "taylor, all steps": {"method": "taylor", "epochs": "50 steps"},
    "netslim": TRAINED | {"method": "netslim", "epochs": f"{SEARCH} steps"},
    "rarts": TRAINED | {"method": "rarts", "epochs": f"{SEARCH // 2} steps"},
}
MORE = {"magnitude, all steps": SEARCH, "taylor, all steps": SEARCH - 50}  # steps that go to fine-tuning instead
FULL = {"dims 60%": [], "MACs 30%": ["random", "magnitude", "magnitude, all steps", "rarts"]}  # tuned at the full rate
RANKING = {"dims 60%": "global", "MACs 30%": "group"}  # of magnitudes, the best of all
ROWS = {f"{cut}: {name}": (cut, name) for cut in CUTS for name in METHODS}


QUICK = ("MACs 30%: magnitude", "MACs 30%: rarts")


def recipe(row: str, seed: int, quick: bool) -> dict[str, Any]:
    cut, name = ROWS[row]
    search = METHODS[name] | ({"ranking": RANKING[cut]} if name.startswith("magnitude") else {})
    tune = TRAINED | {"epochs": f"{TUNE + MORE.get(name, 0)} steps", "best": False}
    tune |= {} if name in FULL[cut] else {"lr": GENTLE}
    if quick:
        tune["epochs"] = "10 steps"
        search |= {"epochs": "10 steps"} if "epochs" in search else {}
    return {
        "target": {"channels": False, "attention": True, "mlp": True},
        "budget": CUTS[cut],
        "search": search,
        "finetune": tune,
        "timing": {"repeats": 3},
        "seed": seed,
    }


@cache
def images(folder: Path, validate: bool, quick: bool) -> tuple[TensorDataset, TensorDataset]:
    """What the dense network was trained on, with crops and flips, and 5000 images to measure on."""
    trained, count = (1000, 500) if quick else (vit.IMAGES, 5000)
    held = data.cifar10(folder, "train", count, vit.IMAGES) if validate else data.cifar10(folder, "test", count, 5000)
    return data.Flipped(*data.cifar10(folder, "train", trained)), TensorDataset(*held)


def one(job: methods.Job) -> methods.Row:
    """A whole pruning."""
    name, seed, options = job
    torch.set_num_threads(1)
    train, held = images(options.data, options.validate, options.quick)
    dense = _dense(options)
    batches, val = DataLoader(train, BATCH, shuffle=True, drop_last=True), DataLoader(held, 500)
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


def _dense(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return cifar_vit().eval() if options.quick else vit.trained(options.data, options.out)


def main() -> None:
    parser = methods.options_of(__doc__, workers=1)
    parser.add_argument("--quick", action="store_true", help="two methods, one seed, few steps, random weights")
    parser.add_argument("--out", type=Path, default=Path.home() / ".cache" / "compress", help="where weights are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dense = _dense(options)
    options.seeds = 1 if options.quick else options.seeds
    file = results.named("transformer_validation" if options.validate else "transformer", options.quick)
    known = {} if options.quick else results.load(file)
    settings = {"batch": BATCH, "search_batches": SEARCH, "finetune_batches": TUNE, "methods": METHODS, "more": MORE}
    settings |= {
        "cuts": CUTS,
        "training": TRAINED,
        "gentle": GENTLE,
        "full_rate": FULL,
        "ranking": RANKING,
        "weights": vit.digest(dense),
    }
    rows: list[methods.Row] = known["rows"] if known == known | settings else []  # others' weights, others' rows
    for row in methods.rows_of(one, QUICK if options.quick else ROWS, options, list(rows)):
        rows.append(row)
        print(row, flush=True)
        results.save(file, settings | {"rows": rows})
    results.show(file, sheets({"rows": rows}))


def sheets(content: dict[str, Any]) -> list[results.Sheet]:
    """The tables, and what each layer has left."""
    rows, found = content["rows"], []
    head = ("method", "right after the cut, %", "fine-tuned, %", "parameters", "MACs", "attention", "seeds", "seconds")
    for cut in CUTS:
        lines = []
        for row, (where, name) in ROWS.items():
            if where == cut and (mine := [r for r in rows if r["method"] == row]):
                measured = [methods.percents([r[key] for r in mine]) for key in ("sliced", "tuned")]
                costs = [f"{mean(r[key] for r in mine):.1%}" for key in ("params", "macs", "attention")]
                lines.append([name, *measured, *costs, str(len(mine)), methods.spent(mine)])
        if lines:
            found.append(results.Sheet(head, lines, f"{cut} left; dense {rows[0]['dense']:.1%}"))
    first = [r for r in rows if r["seed"] == 0 and ROWS[r["method"]][1] == "rarts"]
    title = "Dimensions that rarts leaves, seed 0 (as figure 4.2 of the thesis)"
    layers = [
        [layer, *(f"{bar(r['left'][layer], 20)} {r['left'][layer]:.0%}" for r in first)]
        for layer in (first[0]["left"] if first else ())
    ]
    return [*found, results.Sheet(("layer", *(r["method"] for r in first)), layers, title)] if first else found


if __name__ == "__main__":
    main()
