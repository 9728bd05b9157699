"""Accuracy right after the cut, with and without adding the mean of dropped channels to their readers' biases.

    python -m benchmarks.compensate [--quick] [--data FOLDER] [--images 2000]

CIFAR-10 ResNet-20 and ResNet-56, no fine-tuning. The means have a closed form behind a batch norm; elsewhere they are
measured on four training batches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from compress.budget import choose_widths
from compress.errors import BudgetError
from compress.graph import Groups
from compress.recipe import Budget, Target
from compress.search import base as search
from compress.surgery import Plan, compensate_, find_groups, slice_

from . import data, results
from .models import load_cifar_resnet

NETWORKS = ("resnet20", "resnet56")
TARGETS = {"channels": Target(), "channels + residual": Target(residual=True)}
MACS_LEFT = (0.9, 0.8, 0.7, 0.5)
SEARCHES = [("magnitude", 0), ("random", 0), ("random", 1), ("random", 2)]
BATCHES, BATCH = 4, 128


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of correctly classified images."""
    correct = [(model(x).argmax(1) == y).sum() for x, y in zip(images.split(500), labels.split(500), strict=True)]
    return int(sum(correct)) / len(labels)


def compare_cuts(
    model: nn.Module,
    groups: Groups,
    target: Target,
    macs_left: float,
    method: str,
    seed: int,
    batches: list[Tensor],
    test_data: Any,
) -> dict[str, Any]:
    """Remove the same dimensions with and without compensation; return the accuracies."""
    config = search.config_class(method)(method=method)
    importance = search.data_free_importance(config, model, groups, seed)
    try:
        keep = choose_widths(
            groups, importance, Budget(macs=macs_left), target, ranking=config.ranking_for(groups, "macs")
        )
    except BudgetError as error:
        return {"error": str(error)}
    plan, compensated_plan = Plan.build(model, groups, keep), Plan.build(model, groups, keep)
    cut = slice_(copy.deepcopy(model), plan)
    compensated = copy.deepcopy(model)
    readers = compensate_(compensated, groups, compensated_plan, batches)
    slice_(compensated, compensated_plan)
    return {
        "macs_left": int(groups.cost.macs([len(keep[n]) for n in groups.cost.names]))
        / int(groups.cost.macs(groups.cost.widths)),
        "readers": len(readers),
        "closed_form": sum(groups.input_norms.get(f"{path}.weight") is not None for path in readers),
        "cut": accuracy(cut, *test_data),
        "compensated": accuracy(compensated, *test_data),
    }


def run_cuts(folder: Path, images: int, names: Sequence[str], fractions: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield a row for every network, target, budget, method and seed."""
    test_data = data.load_cifar10(folder, "test", images)
    batches = list(data.load_cifar10(folder, "train", BATCHES * BATCH)[0].split(BATCH))
    for name in names:
        model = load_cifar_resnet(name, folder)
        dense = accuracy(model, *test_data)
        for label, target in TARGETS.items():
            groups = find_groups(model, batches[0][:1], target)
            for macs_left, (method, seed) in product(fractions, SEARCHES):
                case = {
                    "network": name,
                    "target": label,
                    "left": macs_left,
                    "method": method,
                    "seed": seed,
                    "dense": dense,
                }
                yield case | compare_cuts(model, groups, target, macs_left, method, seed, batches, test_data)


def average_over_seeds(cuts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per network, target, budget and method with the means over seeds."""
    table = []
    for name, label, macs_left, method in product(NETWORKS, TARGETS, MACS_LEFT, ("magnitude", "random")):
        seed_rows = [
            r
            for r in cuts
            if (r["network"], r["target"], r["left"], r["method"]) == (name, label, macs_left, method) and "cut" in r
        ]
        if seed_rows:
            means = {key: mean(r[key] for r in seed_rows) for key in ("dense", "cut", "compensated", "macs_left")}
            gains = [r["compensated"] - r["cut"] for r in seed_rows]
            case = {"network": name, "target": label, "left": macs_left, "method": method, "seeds": len(seed_rows)}
            table.append(case | means | {"gain": mean(gains), "least_gain": min(gains)})
    return table


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the table of means over seeds."""
    lines = []
    for r in content["table"]:
        numbers = [f"{r[key]:.1%}" for key in ("dense", "cut", "compensated")]
        cells = [r["network"], r["target"], f"{r['macs_left']:.1%}", f"{r['method']} ({r['seeds']})", *numbers]
        lines.append([*cells, f"{100 * r['gain']:+.1f}"])
    head = ("network", "target", "MACs left", "search (seeds)", "dense", "cut", "compensated", "gain, points")
    return [results.ResultTable(head, lines, content["summary"])]


def main() -> None:
    parser = results.make_parser(__doc__, data=True)
    parser.add_argument("--images", type=int, default=2000, help="number of test images")
    options = parser.parse_args()
    names, fractions, images = (
        (NETWORKS[:1], MACS_LEFT[1:2], 500) if options.quick else (NETWORKS, MACS_LEFT, options.images)
    )
    total, runs = (
        len(names) * len(TARGETS) * len(fractions) * len(SEARCHES),
        run_cuts(options.data, images, names, fractions),
    )
    cuts = list(track(runs, "cuts", total=total, console=results.console()))
    table = average_over_seeds(cuts)
    better, worse = (sum(sign * (r.get("compensated", 0) - r.get("cut", 0)) > 0 for r in cuts) for sign in (1, -1))
    gain = 100 * mean(r["gain"] for r in table)
    summary = (
        f"compensated is better on {better} and worse on {worse} of {len(cuts)} cuts; mean gain {gain:+.1f} points"
    )
    content = {"summary": summary, "images": images, "table": table, "cuts": cuts}
    file = results.result_name("compensate", options.quick)
    results.save(file, content)
    results.publish(file, tables(content))


if __name__ == "__main__":
    main()
