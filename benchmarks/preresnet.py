"""PreResNet-164 with 40 % and 60 % of its channels pruned: MACs compared with table 4.1 of the thesis.

    python -m benchmarks.preresnet [--quick] [--data FOLDER] [--train 120] [--search 40]

F. Xue, Relaxation and Optimization for Automated Learning of Neural Network Architectures, 2022, section 4.2.2.
Like network slimming, the thesis counts 12112 channels: 4032 inner ones, two layers of them per bottleneck, and 8080
positions where a block or the classifier reads a channel of the residual stream and may skip it, while the stream
itself stays (`target.selection`). Splits of these: `uniform` cuts the same fraction of each layer, `inner N %` cuts N %
of the inner channels and takes the rest from the selections, and `rarts` is the result of the search. For comparison,
splits of the 4032 inner channels alone: `inner only`, uniform, and with the fewest and the most MACs; `streams` also
cuts the residual streams, the same channels wherever a stream is read.

There are no trained weights of this network here. The searched network was trained on a few thousand images, so its
split shows what the method does with almost equal channels, not which channels a trained network can spare.
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
from compress.graph import Groups
from compress.graph.costs import Cost
from compress.recipe import Target

from . import data, results
from .models import PreResNet, preresnet164

Int = NDArray[np.int64]
INNER: dict[str, Any] = {"exclude": ["conv1"]}  # the 16 channels of the stem, which network slimming does not prune
TARGET: dict[str, Any] = {"selection": True, "round_to": 1}
INNER_PRUNED = {40: (0.0, 0.1), 60: (0.2, 0.3)}  # percent of all channels pruned -> parts of the inner channels
MIN_KEEP = Target().min_keep
THESIS_MACS = {  # percent of channels pruned -> MACs of RARTS in the thesis
    "cifar10": {40: 1.90e8, 60: 1.33e8},
    "cifar100": {40: 1.78e8, 60: 1.23e8},
}
TRAINING_NOTE = "trained for {} steps only: shows what the method does with almost equal channels"


def find_inner_groups(model: PreResNet, **target: Any) -> Groups:
    """Find the groups of inner channels, two per bottleneck; with `residual=True` also those of the streams."""
    return compress.find_groups(model, torch.randn(1, 3, 32, 32), Target(**INNER | target))


def find_thesis_groups(model: PreResNet) -> Groups:
    """Find the groups that network slimming and the thesis count: inner channels, and what norms select."""
    return compress.find_groups(model, torch.randn(1, 3, 32, 32), Target(**TARGET))


def is_selection(groups: Groups) -> NDArray[np.bool_]:
    """Return for each group whether it is what a norm selects from a stream."""
    return np.array([groups[name].kind == "selection" for name in groups.cost.names], dtype=bool)


def split_widths(groups: Groups, fraction_left: float, inner_pruned: float) -> Int:
    """Return the widths that prune this part of every inner group, and the rest of the channels from the selections."""
    widths, selected = groups.cost.widths, is_selection(groups)
    num_pruned = (1 - fraction_left) * widths.sum() - inner_pruned * widths[~selected].sum()
    left = np.where(selected, 1 - num_pruned / widths[selected].sum(), 1 - inner_pruned)
    result: Int = np.rint(left * widths).astype(np.int64)
    return result


def uniform_widths(cost: Cost, fraction_left: float) -> Int:
    """Return the widths that keep the same fraction of every group, rounded to the nearest channel."""
    widths: Int = np.rint(fraction_left * cost.widths).astype(np.int64)
    return widths


@dataclass(frozen=True)
class CostRange:
    """Widths of the splits with the fewest and the most MACs."""

    cheapest: Int
    dearest: Int


def cost_range(cost: Cost, fraction_left: float, min_keep: int = MIN_KEEP) -> CostRange:
    """Return the extremes over all splits that keep `fraction_left` of the inner channels.

    Each group keeps at least `min_keep` channels. The MACs of a bottleneck are bilinear in its two widths and, because
    the streams are not cut, independent of other bottlenecks. The best pair of widths for every number of removed
    channels is computed per bottleneck, and the distribution over bottlenecks by dynamic programming; the result is
    exact.
    """
    num_removed = int(cost.widths.sum()) - int(fraction_left * int(cost.widths.sum()))
    return CostRange(*(_extreme_widths(cost, num_removed, min_keep, sign) for sign in (-1, 1)))


def _extreme_widths(cost: Cost, num_removed: int, min_keep: int, sign: int) -> Int:
    """Return the widths with the most MACs after removing `num_removed` channels; with the fewest if `sign` is -1."""
    values = np.full(num_removed + 1, -np.inf)
    values[0] = 0
    choices, pairs = [], []
    for pair in range(0, len(cost.widths), 2):
        gains, pair_widths = _best_bottleneck_widths(cost, pair, min_keep, sign)
        shifted = np.full((len(gains), num_removed + 1), -np.inf)
        for removed, value in enumerate(gains[: num_removed + 1]):
            shifted[removed, removed:] = values[: num_removed + 1 - removed] + value
        choices.append(shifted.argmax(0))
        pairs.append(pair_widths)
        values = shifted.max(0)
    widths = cost.widths.copy()
    for pair in reversed(range(len(choices))):
        removed = int(choices[pair][num_removed])
        widths[2 * pair : 2 * pair + 2] = pairs[pair][removed]
        num_removed -= removed
    return widths


def _best_bottleneck_widths(cost: Cost, index: int, min_keep: int, sign: int) -> tuple[NDArray[np.float64], Int]:
    """Return, by number of channels removed from groups `index` and `index + 1`, the best change and the two widths.

    The change is `sign` times the difference in MACs from the dense network.
    """
    width = int(cost.widths[index])
    rows = np.repeat(cost.widths[None], 4, axis=0)
    rows[1, index] = rows[2, index + 1] = rows[3, index] = rows[3, index + 1] = width - 1
    dense, first, second, both = cost.macs(rows).tolist()
    counts = np.arange(width - min_keep + 1)
    a, b = np.meshgrid(counts, counts, indexing="ij")  # channels removed from the first and the second group
    change = sign * ((first - dense) * a + (second - dense) * b + (both - first - second + dense) * a * b)
    best, widths = [], []
    for removed in range(2 * (width - min_keep) + 1):
        candidates = np.where(a + b == removed, change, -np.inf)
        x, y = np.unravel_index(candidates.argmax(), candidates.shape)
        best.append(candidates[x, y])
        widths.append((width - x, width - y))
    return np.array(best, dtype=np.float64), np.array(widths, dtype=np.int64)


def count_splits() -> list[dict[str, Any]]:
    """Return the rows that need no training: the MACs of the dense network and of the fixed splits."""
    model = preresnet164().eval()
    thesis, inner, streams = (
        find_thesis_groups(model),
        find_inner_groups(model),
        find_inner_groups(model, residual=True),
    )
    rows = [_row("dense", 0, thesis, thesis.cost.widths)]
    for percent in THESIS_MACS["cifar10"]:
        fraction_left = (100 - percent) / 100
        rows.append(_row("uniform", percent, thesis, uniform_widths(thesis.cost, fraction_left)))
        for part in INNER_PRUNED[percent]:
            rows.append(_row(f"inner {part:.0%}", percent, thesis, split_widths(thesis, fraction_left, part)))
        extremes = cost_range(inner.cost, fraction_left)
        rows.append(_row("inner only, uniform", percent, inner, uniform_widths(inner.cost, fraction_left)))
        rows.append(_row("inner only, cheapest", percent, inner, extremes.cheapest))
        rows.append(_row("inner only, dearest", percent, inner, extremes.dearest))
        rows.append(_row("streams", percent, streams, uniform_widths(streams.cost, fraction_left)))
    return rows


def _row(split: str, percent: int, groups: Groups, widths: Int) -> dict[str, Any]:
    cost, selected, stages = groups.cost, is_selection(groups), {}
    for stage in ("layer1", "layer2", "layer3"):
        indices = [i for i, name in enumerate(cost.names) if name.startswith(stage)]
        stages[stage] = round(float(widths[indices].sum() / cost.widths[indices].sum()), 4)
    return {
        "split": split,
        "prc": percent,
        "macs": int(cost.macs(widths)),
        "params": int(cost.params(widths)),
        "dims": int(widths.sum()),
        "of": int(cost.widths.sum()),
        "left_of_inner": _part_left(cost, widths, ~selected),
        "left_of_selections": _part_left(cost, widths, selected) if selected.any() else None,
        "left_by_stage": stages,
    }


def _part_left(cost: Cost, widths: Int, chosen: NDArray[np.bool_]) -> float:
    return round(float(widths[chosen].sum() / cost.widths[chosen].sum()), 4)


def train_briefly(images: TensorDataset, steps: int) -> PreResNet:
    """Train PreResNet-164 from random weights for a few steps."""
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


def search_splits(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the splits found by short searches with the fixed penalty of the thesis and the budget regularizer."""
    train = TensorDataset(*data.load_cifar10(options.data, "train", 32 * options.train))
    val = DataLoader(TensorDataset(*data.load_cifar10(options.data, "test", 100 if options.quick else 500)), 100)
    start = time.perf_counter()
    model = train_briefly(train, options.train)
    print(f"trained in {time.perf_counter() - start:.0f} s", flush=True)
    groups = find_thesis_groups(model)
    rows = []
    for percent in [*THESIS_MACS["cifar10"]][: 1 if options.quick else None]:
        for gamma in ("auto",) if options.quick else (1e-4, "auto"):
            search = {"method": "rarts", "epochs": f"{options.search} steps", "lr": 0.1, "gamma": gamma}
            recipe = {
                "target": TARGET,
                "budget": {"dims": f"{100 - percent}%"},
                "search": search | {"update": "fused"},
                "timing": {"repeats": 3},
            }
            start = time.perf_counter()
            pruned = compress.prune(model, recipe, train=DataLoader(train, 16, shuffle=True), val=val, quiet=True)
            widths = np.array([len(pruned.plan.keep[name]) for name in groups.cost.names])
            row = _row(f"rarts, gamma {gamma:g}" if gamma != "auto" else "rarts, gamma auto", percent, groups, widths)
            assert row["macs"] == pruned.report.pruned.macs
            row["note"] = TRAINING_NOTE.format(options.train)
            row["accuracy_before_and_after"] = [
                side.metrics["accuracy"] for side in (pruned.report.dense, pruned.report.pruned)
            ]
            row["seconds"] = round(time.perf_counter() - start)
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = results.make_parser(__doc__, data=True)
    parser.add_argument("--train", type=int, default=120, help="training steps of 32 images, from random weights")
    parser.add_argument("--search", type=int, default=40, help="search steps of two batches of 16 images")
    options = parser.parse_args()
    file = results.result_name("preresnet", options.quick)
    if options.quick:
        options.train, options.search = 2, 2
    rows = count_splits()
    content = {"thesis": THESIS_MACS, "train_steps": options.train, "search_steps": options.search, "seed": 0}
    results.save(file, content | {"rows": rows})
    rows += search_splits(options)
    results.save(file, content | {"rows": rows})
    results.publish(file, tables({"rows": rows}))


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the table of splits."""
    rows, lines = content["rows"], []
    for row in rows:
        thesis_macs = THESIS_MACS["cifar10"].get(row["prc"])
        macs = [f"{row['macs'] / 1e8:.3f}e8", f"{row['macs'] / rows[0]['macs']:.1%}"]
        thesis = "2.48e8" if thesis_macs is None else f"{thesis_macs / 1e8:.2f}e8"
        sizes = [f"{row['params'] / 1e6:.2f} M", f"{row['dims']} of {row['of']}"]
        stages = " ".join(f"{left:.0%}" for left in row["left_by_stage"].values())
        kinds = [f"{row['left_of_inner']:.0%}", "-" if (x := row["left_of_selections"]) is None else f"{x:.0%}"]
        lines.append([row["split"], f"{row['prc']} %", *macs, thesis, *sizes, *kinds, stages])
    head = ("split", "pruned", "MACs", "of dense", "table 4.1", "parameters", "channels")
    head = (*head, "inner left", "selections left", "left by stage")
    return [results.ResultTable(head, lines)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
