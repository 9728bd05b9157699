"""Accuracy over fine-tuning steps, from a plain cut, a repaired one and Torch-Pruning's.

    python -m benchmarks.repair_steps [--quick] [--data FOLDER]

ResNet-20 at 50 and 35 % of the MACs, cut by magnitude, after 0, 10, 30, 100 and 300 fine-tuning steps with the dense
network as the only teacher: batches of 64, SGD, a cosine that ends at the last step. Repair and measurements are those
of benchmarks/repair.py. Of Torch-Pruning's magnitude and Taylor importance, local and global, the one that is best
right after the cut is fine-tuned. An interrupted run resumes where it stopped. The chart is
benchmarks/results/repair_steps.png.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.search import base as search
from compress.surgery import find_groups

from . import data, results
from .repair import TP_IMPORTANCES, cut, cut_with_torch_pruning, importance_of, load_subject

MACS_LEFT = (0.5, 0.35)
STEPS, QUICK_STEPS = (0, 10, 30, 100, 300), (0, 10)
STARTS = {"plain": "cut by magnitude", "least squares": "cut and repaired", "torch-pruning": "Torch-Pruning"}
Row = dict[str, Any]


def run(options: argparse.Namespace, rows: dict[str, Row]) -> Iterator[None]:
    """Measure the rows that are missing; yield after each."""
    subject = load_subject("resnet20", options)
    groups = find_groups(subject.model, subject.images[:1], subject.target)
    train = data.CropFlipDataset(*data.load_cifar10(options.data, "train", 1000 if options.quick else 20000))
    importance = importance_of("magnitude", subject, groups)
    ranking = search.config_class("magnitude")(method="magnitude").ranking_for(groups, "macs")

    def network(macs_left: float, start: str) -> nn.Module:
        if start != "torch-pruning":
            return cut(subject, groups, importance, macs_left, ranking, start)[0]
        settings = product(TP_IMPORTANCES, (False, True))
        return max((cut_with_torch_pruning(subject, groups, macs_left, *s) for s in settings), key=subject.accuracy)

    for macs_left, start in product(MACS_LEFT, STARTS):
        key = f"{macs_left} {start}"
        if key in rows:
            continue
        model, accuracies = network(macs_left, start), {}
        for steps in QUICK_STEPS if options.quick else STEPS:
            tuned = copy.deepcopy(model)
            fine_tune_(tuned, subject.model, train, steps)
            accuracies[str(steps)] = subject.accuracy(tuned)
            print(key, steps, accuracies[str(steps)], flush=True)
        rows[key] = {"macs_left": macs_left, "start": start, "accuracies": accuracies}
        yield


def fine_tune_(model: nn.Module, teacher: nn.Module, train: TensorDataset, steps: int) -> None:
    """Train with SGD, cosine decay and the teacher's predictions, as `finetune` does."""
    torch.manual_seed(0)
    loader = DataLoader(train, 64, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    model.train()
    done = 0
    while done < steps:
        for x, _ in loader:
            with torch.no_grad():
                expected = teacher(x)
            loss = compress.distillation(model(x), expected, 4)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            done += 1
            if done == steps:
                break
    model.eval()


def draw_chart(rows: dict[str, Row]) -> None:
    """Write repair_steps.png: accuracy over steps, a panel for each budget."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(MACS_LEFT), figsize=(9, 3.4), sharey=True)
    for axis, macs_left in zip(axes, MACS_LEFT, strict=True):
        for start, label in STARTS.items():
            accuracies = rows[f"{macs_left} {start}"]["accuracies"]
            percents = [100 * accuracies[str(steps)] for steps in STEPS]
            axis.plot(range(len(STEPS)), percents, marker="o", label=label)
        axis.set_xticks(range(len(STEPS)), [str(steps) for steps in STEPS])
        axis.set_title(f"ResNet-20, {macs_left:.0%} of the MACs")
        axis.set_xlabel("fine-tuning steps")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy, %")
    axes[-1].legend()
    figure.tight_layout()
    figure.savefig(results.FOLDER / "repair_steps.png", dpi=110)


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the accuracy over fine-tuning steps."""
    rows = list(content["rows"].values())
    if not rows:
        return []
    lines = [
        [
            f"{row['macs_left']:.0%}",
            STARTS[row["start"]],
            *(f"{100 * value:.1f}" for value in row["accuracies"].values()),
        ]
        for row in rows
    ]
    head = ("MACs left", "start", *(f"{steps} steps" for steps in rows[0]["accuracies"]))
    return [results.ResultTable(head, lines, "ResNet-20: accuracy after fine-tuning steps, %")]


def main() -> None:
    options = results.make_parser(__doc__, data=True).parse_args()
    torch.set_num_threads(1)
    file = results.result_name("repair_steps", options.quick)
    rows: dict[str, Row] = {} if options.quick else results.load(file).get("rows", {})
    for _ in run(options, rows):
        results.save(file, {"rows": rows})
    if not options.quick:
        draw_chart(rows)
    results.publish(file, tables({"rows": rows}))


if __name__ == "__main__":
    main()
