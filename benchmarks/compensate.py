"""Accuracy right after the cut, with and without the mean of what was dropped in the readers' biases.

    python -m benchmarks.compensate [--quick] [--data FOLDER] [--images 2000]

CIFAR-10 ResNet-20 and ResNet-56, no fine-tuning. Means are known in closed form behind a batch norm and measured on
four training batches elsewhere.
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

from compress import search
from compress.budget import BudgetError, choose
from compress.compensate import compensate_
from compress.discover import find_groups
from compress.groups import Groups
from compress.plan import Plan
from compress.recipe import Budget, Target
from compress.slicing import slice_

from . import data, results
from .models import cifar_resnet

NETWORKS = ("resnet20", "resnet56")
TARGETS = {"channels": Target(), "channels + residual": Target(residual=True)}
LEFT = (0.9, 0.8, 0.7, 0.5)
SEARCHES = [("magnitude", 0), ("random", 0), ("random", 1), ("random", 2)]
BATCHES, BATCH = 4, 128


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    hits = [(model(x).argmax(1) == y).sum() for x, y in zip(images.split(500), labels.split(500), strict=True)]
    return int(sum(hits)) / len(labels)


def one(
    model: nn.Module,
    groups: Groups,
    target: Target,
    left: float,
    method: str,
    seed: int,
    batches: list[Tensor],
    test: Any,
) -> dict[str, Any]:
    """Cut the same dimensions twice, once plainly and once compensated."""
    config = search.config_class(method)(method=method)
    importance = search.importance(config, model, groups, seed)
    try:
        keep = choose(groups, importance, Budget(macs=left), target, ranking=config.ranks_by(groups, "macs"))
    except BudgetError as error:
        return {"error": str(error)}
    plan, again = Plan.build(model, groups, keep), Plan.build(model, groups, keep)
    cut = slice_(copy.deepcopy(model), plan)
    mended = copy.deepcopy(model)
    readers = compensate_(mended, groups, again, batches)
    slice_(mended, again)
    return {
        "macs_left": int(groups.cost.macs([len(keep[n]) for n in groups.cost.names]))
        / int(groups.cost.macs(groups.cost.widths)),
        "readers": len(readers),
        "closed_form": sum(groups.norms.get(f"{path}.weight") is not None for path in readers),
        "cut": accuracy(cut, *test),
        "compensated": accuracy(mended, *test),
    }


def rows(folder: Path, images: int, names: Sequence[str], lefts: Sequence[float]) -> Iterator[dict[str, Any]]:
    test = data.cifar10(folder, "test", images)
    batches = list(data.cifar10(folder, "train", BATCHES * BATCH)[0].split(BATCH))
    for name in names:
        model = cifar_resnet(name, folder)
        dense = accuracy(model, *test)
        for label, target in TARGETS.items():
            groups = find_groups(model, batches[0][:1], target)
            for left, (method, seed) in product(lefts, SEARCHES):
                case = {"network": name, "target": label, "left": left, "method": method, "seed": seed, "dense": dense}
                yield case | one(model, groups, target, left, method, seed, batches, test)


def condensed(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per network, target, budget and method: the mean over seeds."""
    table = []
    for name, label, left, method in product(NETWORKS, TARGETS, LEFT, ("magnitude", "random")):
        same = [
            r
            for r in found
            if (r["network"], r["target"], r["left"], r["method"]) == (name, label, left, method) and "cut" in r
        ]
        if same:
            means = {key: mean(r[key] for r in same) for key in ("dense", "cut", "compensated", "macs_left")}
            gains = [r["compensated"] - r["cut"] for r in same]
            case = {"network": name, "target": label, "left": left, "method": method, "seeds": len(same)}
            table.append(case | means | {"gain": mean(gains), "least_gain": min(gains)})
    return table


def sheets(content: dict[str, Any]) -> list[results.Sheet]:
    lines = []
    for r in content["table"]:
        numbers = [f"{r[key]:.1%}" for key in ("dense", "cut", "compensated")]
        cells = [r["network"], r["target"], f"{r['macs_left']:.1%}", f"{r['method']} ({r['seeds']})", *numbers]
        lines.append([*cells, f"{100 * r['gain']:+.1f}"])
    head = ("network", "target", "MACs left", "search (seeds)", "dense", "cut", "compensated", "gain, points")
    return [results.Sheet(head, lines, content["summary"])]


def main() -> None:
    parser = results.options_of(__doc__, data=True)
    parser.add_argument("--images", type=int, default=2000, help="test images")
    options = parser.parse_args()
    names, lefts, images = (NETWORKS[:1], LEFT[1:2], 500) if options.quick else (NETWORKS, LEFT, options.images)
    total, cuts = len(names) * len(TARGETS) * len(lefts) * len(SEARCHES), rows(options.data, images, names, lefts)
    found = list(track(cuts, "cuts", total=total, console=results.console()))
    table = condensed(found)
    better, worse = (sum(sign * (r.get("compensated", 0) - r.get("cut", 0)) > 0 for r in found) for sign in (1, -1))
    gain = 100 * mean(r["gain"] for r in table)
    summary = (
        f"compensated is better on {better} and worse on {worse} of {len(found)} cuts; mean gain {gain:+.1f} points"
    )
    content = {"summary": summary, "images": images, "table": table, "cuts": found}
    file = results.named("compensate", options.quick)
    results.save(file, content)
    results.show(file, sheets(content))


if __name__ == "__main__":
    main()
