"""The tour that `make quickstart` gives: one network, at every stage the same function."""

from __future__ import annotations

import copy
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from .api import load, prune


class Block(nn.Module):
    """Two convolutions around a residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(x + inner)


class Network(nn.Sequential):
    """A small residual network for 1x32x32 images, with norms as after training: no two channels alike."""

    def __init__(self, width: int = 32) -> None:
        torch.manual_seed(0)
        stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        down = nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU())
        stage1, stage2 = (nn.Sequential(Block(w), Block(w)) for w in (width, 2 * width))
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))
        super().__init__(OrderedDict(stem=stem, stage1=stage1, down=down, stage2=stage2, head=head))
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.3)
                module.running_mean = torch.randn(module.num_features) * 0.1


def quickstart(out: Console) -> None:
    """Prune, compare every stage with the one before, save, reload, and show the table."""
    dense, x = Network().eval(), torch.randn(64, 1, 32, 32)
    out.print("[bold]1.[/] a residual network, cut to half of its multiply-adds by weight magnitude")
    pruned = prune(dense, "magnitude_half", example_inputs=x)
    out.print(pruned.report)
    out.print("[bold]2.[/] each stage computes what the one before did")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        pruned.save(Path(folder) / "quickstart")
        reloaded = load(Network().eval(), Path(folder) / "quickstart")
        zeroed = pruned.plan.zero_(copy.deepcopy(dense).double())
        sliced = pruned.plan.apply_(copy.deepcopy(dense).double())
        rows = [
            ("zeroed = sliced", float((zeroed(x.double()) - sliced(x.double())).abs().max()), 1e-10),
            ("sliced = reloaded", float((pruned.model(x) - reloaded(x)).abs().max()), 0.0),
        ]
    table = Table("stages", "largest difference", "")
    for name, off, bound in rows:
        table.add_row(name, f"{off:.1e}", "[green]equal[/]" if off <= bound else "[red]NOT EQUAL[/]")
    out.print(table)
    before, after = _milliseconds(dense, reloaded, x)
    out.print(f"[bold]3.[/] {before:.1f} ms -> {after:.1f} ms for {len(x)} images on this CPU ({before / after:.1f}x)")
    if any(off > bound for _, off, bound in rows):
        raise SystemExit(1)


@torch.no_grad()
def _milliseconds(first: nn.Module, second: nn.Module, x: Tensor, repeats: int = 15) -> tuple[float, float]:
    """The medians of two models' times, measured in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for model, record in zip((first, second), times, strict=True):
            start = time.perf_counter()
            model(x)
            record.append(1e3 * (time.perf_counter() - start))
    return sorted(times[0])[repeats // 2], sorted(times[1])[repeats // 2]
