"""PreResNet-164 with 40 % and 60 % of its channels pruned: multiply-adds, against table 4.1 of the thesis.

    python -m benchmarks.preresnet [--quick] [--data FOLDER] [--train 120] [--search 40]

F. Xue, Relaxation and Optimization for Automated Learning of Neural Network Architectures, 2022, section 4.2.2.
"40 % of the channels" are not the same ones there and here. Network slimming counts 12112: 4032 inner channels, two
layers of them per bottleneck, and 8080 places where a block or the classifier reads a channel of the residual stream
and may leave it out, whereas the stream itself stays. Here the 4032 inner channels are cut, so the split and the
multiply-adds differ: `uniform` takes the same part of every layer, `cheapest` and `dearest` are the ends of what any
split with that many inner channels gone can cost, `streams` cuts the residual streams along, and `rarts` is what the
search finds.

There are no trained weights of this network here. The one that is searched has seen a few thousand images, so its split
says what the mechanism does with nearly equal channels, not where a trained network has its spare ones.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.cost import Cost
from compress.groups import Groups
from compress.recipe import Target

from . import data, results
from .models import PreResNet, preresnet164

Int = NDArray[np.int64]
TARGET: dict[str, Any] = {"exclude": ["conv1"]}  # the stem's 16 channels, which network slimming leaves as they are
LEAST = Target().min_keep
TABLE = {  # percent pruned -> MACs that the thesis has for RARTS
    "cifar10": {40: 1.90e8, 60: 1.33e8},
    "cifar100": {40: 1.78e8, 60: 1.23e8},
}
BARELY = "trained for {} steps only: this split says what the mechanism gives, not what a trained network gives"


def inner_groups(model: PreResNet, **target: Any) -> Groups:
    """The groups of inner channels, two per bottleneck; `residual=True` for those of the streams, too."""
    return compress.find_groups(model, torch.randn(1, 3, 32, 32), Target(**TARGET | target))


def uniform(cost: Cost, left: float) -> Int:
    """The same part of every group, to the nearest channel."""
    widths: Int = np.rint(left * cost.widths).astype(np.int64)
    return widths


@dataclass(frozen=True)
class Ends:
    """The widths of a split that costs least, and of one that costs most."""

    cheapest: Int
    dearest: Int


def ends(cost: Cost, left: float, least: int = LEAST) -> Ends:
    """Over all splits that keep `left` of the inner channels, and `least` at least of each group.

    What a bottleneck costs is bilinear in its two widths, and whole streams leave bottlenecks apart. So the best pair
    of widths for every number of channels gone is found bottleneck by bottleneck, and how many go where by dynamic
    programming: the ends are exact.
    """
    gone = int(cost.widths.sum()) - int(left * int(cost.widths.sum()))
    return Ends(*(_extreme(cost, gone, least, sign) for sign in (-1, 1)))


def _extreme(cost: Cost, gone: int, least: int, sign: int) -> Int:
    """The dearest widths with so many channels gone, or, where `sign` is -1, the cheapest."""
    values = np.full(gone + 1, -np.inf)
    values[0] = 0
    choices, pairs = [], []
    for i in range(0, len(cost.widths), 2):
        best, widths = _bottleneck(cost, i, least, sign)
        shifted = np.full((len(best), gone + 1), -np.inf)
        for r, value in enumerate(best[: gone + 1]):
            shifted[r, r:] = values[: gone + 1 - r] + value
        choices.append(shifted.argmax(0))
        pairs.append(widths)
        values = shifted.max(0)
    kept = cost.widths.copy()
    for i in reversed(range(len(choices))):
        r = int(choices[i][gone])
        kept[2 * i : 2 * i + 2] = pairs[i][r]
        gone -= r
    return kept


def _bottleneck(cost: Cost, i: int, least: int, sign: int) -> tuple[NDArray[np.float64], Int]:
    """For every number of channels gone from groups i and i + 1: sign * MACs less than dense, and the two widths."""
    width = int(cost.widths[i])
    rows = np.repeat(cost.widths[None], 4, axis=0)
    rows[1, i] = rows[2, i + 1] = rows[3, i] = rows[3, i + 1] = width - 1
    dense, first, second, both = cost.macs(rows).tolist()
    a, b = np.meshgrid(np.arange(width - least + 1), np.arange(width - least + 1), indexing="ij")  # gone from each
    change = sign * ((first - dense) * a + (second - dense) * b + (both - first - second + dense) * a * b)
    best, widths = [], []
    for r in range(2 * (width - least) + 1):
        here = np.where(a + b == r, change, -np.inf)
        x, y = np.unravel_index(here.argmax(), here.shape)
        best.append(here[x, y])
        widths.append((width - x, width - y))
    return np.array(best, dtype=np.float64), np.array(widths, dtype=np.int64)


def counted() -> list[dict[str, Any]]:
    """What arithmetic alone says."""
    model = preresnet164().eval()
    inner, streams = inner_groups(model).cost, inner_groups(model, residual=True).cost
    rows = [_row("dense", 0, inner, inner.widths)]
    for prc in TABLE["cifar10"]:
        left = (100 - prc) / 100
        reach = ends(inner, left)
        rows.append(_row("uniform", prc, inner, uniform(inner, left)))
        rows.append(_row("cheapest", prc, inner, reach.cheapest))
        rows.append(_row("dearest", prc, inner, reach.dearest))
        rows.append(_row("streams", prc, streams, uniform(streams, left)))
    return rows


def _row(split: str, prc: int, cost: Cost, kept: Int) -> dict[str, Any]:
    stages = {}
    for stage in ("layer1", "layer2", "layer3"):
        mine = [i for i, name in enumerate(cost.names) if name.startswith(stage)]
        stages[stage] = round(float(kept[mine].sum() / cost.widths[mine].sum()), 4)
    return {
        "split": split,
        "prc": prc,
        "macs": int(cost.macs(kept)),
        "params": int(cost.params(kept)),
        "dims": int(kept.sum()),
        "of": int(cost.widths.sum()),
        "left_by_stage": stages,
    }


def briefly_trained(images: TensorDataset, steps: int) -> PreResNet:
    torch.manual_seed(0)
    model = preresnet164().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for (x, y), _ in zip(DataLoader(images, 32, shuffle=True), range(steps), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def searched(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The splits that short searches find, by the thesis' fixed penalty and by the pull that follows the budget."""
    train = TensorDataset(*data.cifar10(options.data, "train", 32 * options.train))
    val = DataLoader(TensorDataset(*data.cifar10(options.data, "test", 100 if options.quick else 500)), 100)
    start = time.perf_counter()
    model = briefly_trained(train, options.train)
    print(f"trained in {time.perf_counter() - start:.0f} s", flush=True)
    cost = inner_groups(model).cost
    rows = []
    for prc in [*TABLE["cifar10"]][: 1 if options.quick else None]:
        for gamma in ("auto",) if options.quick else (1e-4, "auto"):
            search = {"method": "rarts", "epochs": f"{options.search} steps", "lr": 0.1, "gamma": gamma}
            recipe = {
                "target": TARGET,
                "budget": {"dims": f"{100 - prc}%"},
                "search": search | {"update": "fused"},
                "timing": {"repeats": 3},
            }
            start = time.perf_counter()
            pruned = compress.prune(model, recipe, train=DataLoader(train, 16, shuffle=True), val=val, quiet=True)
            kept = np.array([len(pruned.plan.keep[name]) for name in cost.names])
            row = _row(f"rarts, gamma {gamma:g}" if gamma != "auto" else "rarts, gamma auto", prc, cost, kept)
            assert row["macs"] == pruned.report.pruned.macs
            row["note"] = BARELY.format(options.train)
            row["accuracy_before_and_after"] = [
                side.metrics["accuracy"] for side in (pruned.report.dense, pruned.report.pruned)
            ]
            row["seconds"] = round(time.perf_counter() - start)
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = results.options_of(__doc__, data=True)
    parser.add_argument("--train", type=int, default=120, help="steps of 32 images from random weights")
    parser.add_argument("--search", type=int, default=40, help="steps of two times 16 images")
    options = parser.parse_args()
    file = results.named("preresnet", options.quick)
    if options.quick:
        options.train, options.search = 2, 2
    rows = counted()
    content = {"thesis": TABLE, "train_steps": options.train, "search_steps": options.search, "seed": 0}
    results.save(file, content | {"rows": rows})
    rows += searched(options)
    results.save(file, content | {"rows": rows})
    results.show(file, sheets({"rows": rows}))


def sheets(content: dict[str, Any]) -> list[results.Sheet]:
    rows, lines = content["rows"], []
    for row in rows:
        said = TABLE["cifar10"].get(row["prc"])
        macs = [f"{row['macs'] / 1e8:.3f}e8", f"{row['macs'] / rows[0]['macs']:.1%}"]
        thesis = "2.48e8" if said is None else f"{said / 1e8:.2f}e8"
        sizes = [f"{row['params'] / 1e6:.2f} M", f"{row['dims']} of {row['of']}"]
        stages = " ".join(f"{left:.0%}" for left in row["left_by_stage"].values())
        lines.append([row["split"], f"{row['prc']} %", *macs, thesis, *sizes, stages])
    head = ("split", "pruned", "MACs", "of dense", "table 4.1", "parameters", "channels", "left by stage")
    return [results.Sheet(head, lines)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
