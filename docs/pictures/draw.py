"""Draw a pruning: widths, importance, costs and accuracy.

    python -m docs.pictures.draw [--data FOLDER]
    python -m docs.pictures.draw --report out/report.json --picture out/picture.png

The first prunes a ResNet-20 for about ten minutes and draws the picture of the README; the second draws a run of yours.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch.utils.data import DataLoader, TensorDataset

import compress
from benchmarks import data
from benchmarks.models import load_cifar_resnet
from compress.formatting import format_count
from compress.report import Report

HERE = Path(__file__).parent
TEACHER = {"temperature": 4, "weight": 8}
RECIPE = {
    "budget": {"macs": "50%"},
    "search": {"method": "netslim", "epochs": "300 steps", "lr": 0.02, "distill": TEACHER},
    "finetune": {"epochs": "1000 steps", "lr": 0.02, "distill": TEACHER, "best": False},
}

PALE, KEPT, CUT = "#c8d5ea", "#2460d8", "#e07b2c"


def widths(ax: Axes, report: Report) -> None:
    """Of every group, before and after."""
    rows = report.groups
    y = range(len(rows))
    ax.barh(y, [row.width for row in rows], color=PALE, label="dense")
    ax.barh(y, [row.kept for row in rows], color=KEPT, label="compact")
    for i, row in enumerate(rows):
        ax.text(row.width, i, f" {row.kept} of {row.width}", va="center", fontsize=8)
    ax.set(yticks=y, yticklabels=[row.name for row in rows], xlim=(0, 1.35 * max(row.width for row in rows)))
    ax.set_title("widths")
    ax.invert_yaxis()
    ax.legend(loc="upper right", frameon=False, fontsize=8)


def scores(ax: Axes, report: Report) -> None:
    """Of all dimensions: those that are kept, and those that are dropped."""
    kept: list[float] = []
    dropped: list[float] = []
    for row in report.groups:
        ranked = sorted(report.importance[row.name], reverse=True)
        kept += ranked[: row.kept]
        dropped += ranked[row.kept :]
    ax.hist([kept, dropped], bins=30, stacked=True, color=[KEPT, CUT], label=["kept", "dropped"])
    ax.set_title("importance of the dimensions")
    ax.set_yticks([])
    ax.legend(frameon=False, fontsize=8)


def costs(ax: Axes, report: Report) -> None:
    """What is left of MACs, parameters and latency, and what became of the accuracy."""
    dense, pruned = report.dense, report.pruned
    bars = [
        ("MACs", pruned.macs / dense.macs, f"{format_count(dense.macs)} -> {format_count(pruned.macs)}"),
        ("parameters", pruned.params / dense.params, f"{format_count(dense.params)} -> {format_count(pruned.params)}"),
    ]
    if dense.latency_ms and pruned.latency_ms:
        text = f"{dense.latency_ms:.3g} -> {pruned.latency_ms:.3g} ms"
        bars.append(("latency", pruned.latency_ms / dense.latency_ms, text))
    if "accuracy" in pruned.metrics:
        before, after = dense.metrics["accuracy"], pruned.metrics["accuracy"]
        text = f"{100 * before:.1f} -> {100 * after:.1f} %"
        if "accuracy" in report.sliced:
            text += f"\n({100 * report.sliced['accuracy']:.1f} right after the cut)"
        bars.append(("accuracy", after / before, text))
    for y, (_, left, text) in enumerate(bars):
        ax.barh(y, 1, color=PALE)
        ax.barh(y, left, color=KEPT, height=0.5)
        ax.text(1.08, y, text, va="center", fontsize=8)
    ax.set(yticks=range(len(bars)), yticklabels=[name for name, _, _ in bars], xlim=(0, 1.85))
    ax.set(xticks=[0, 0.5, 1], xticklabels=["0", "50 %", "100 %"], title="dense -> compact")
    ax.invert_yaxis()


def draw(report: Report, path: Path) -> None:
    """Write the picture."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 0.6 + max(2.2, 0.22 * len(report.groups))), layout="constrained")
    for ax, part in zip(axes, (widths, scores, costs), strict=True):
        part(ax, report)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def resnet20(folder: Path) -> Report:
    """A trained ResNet-20 on CIFAR-10, cut to half of its multiply-adds; accuracy on 10000 test images."""
    torch.set_num_threads(1)
    train = DataLoader(
        data.CropFlipDataset(*data.load_cifar10(folder, "train", 50000)), 64, shuffle=True, drop_last=True
    )
    val = DataLoader(TensorDataset(*data.load_cifar10(folder, "test", 10000)), 500)
    return compress.prune(load_cifar_resnet("resnet20", folder), RECIPE, train=train, val=val, device="cpu").report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data.add_data_option(parser)
    parser.add_argument("--report", type=Path, help="of a run that was made; else one is made")
    parser.add_argument("--picture", type=Path, default=HERE / "resnet20.png")
    options = parser.parse_args()
    if options.report is None:
        options.report = HERE / "resnet20.json"
        made = resnet20(options.data)
        made.history.clear()  # long, and not drawn, as the scores are
        made.scores.clear()
        options.report.write_text(made.to_json())
    draw(Report.load(options.report), options.picture)


if __name__ == "__main__":
    main()
