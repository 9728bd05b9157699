"""The tour that `make quickstart` gives: train, search, cut, distil, save, reload, on real data that comes along."""

from __future__ import annotations

import copy
import tempfile
from collections import OrderedDict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from .api import Pruned, load, prune
from .data import loaders
from .display import Display
from .recipe import Data, Recipe


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
    """A small residual network for images of one channel."""

    def __init__(self, width: int = 32) -> None:
        stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        down = nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU())
        stage1, stage2 = (nn.Sequential(Block(w), Block(w)) for w in (width, 2 * width))
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))
        super().__init__(OrderedDict(stem=stem, stage1=stage1, down=down, stage2=stage2, head=head))


def trained(epochs: int = 8, width: int = 32, quiet: bool = False) -> Network:
    """A network that reads the digits: plain PyTorch, as it would be in a script of one's own."""
    with torch.random.fork_rng(devices=[]), Display(quiet) as display:
        torch.manual_seed(0)
        train, _ = loaders(Data(source="digits", batch_size=64))
        model, steps = Network(width), epochs * len(train)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps)
        with display.bar("training the dense one", steps) as bar:
            for _ in range(epochs):
                assert train is not None
                for x, y in train:
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x), y)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    schedule.step()
                    bar.advance({"loss": loss.item()})
    return model.eval()


def quickstart(out: Console, workdir: Path | None = None) -> None:
    """Train, prune by the packaged recipe `quickstart`, check every promise, and show the report.

    Raises:
        FileExistsError: the folder is not empty.
        SystemExit: a stage does not compute what it should, or the compact network is worse than promised.
    """
    folder = workdir or Path(tempfile.mkdtemp(prefix="compress-")) / "quickstart"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            f"--workdir {folder}: expected an empty or missing directory, as the tour starts anew each time; choose "
            "another, or leave --workdir out for a new one"
        )
    out.print("[bold]1.[/] train a residual network on scikit-learn's 1797 handwritten digits")
    dense = trained()
    out.print("[bold]2.[/] search (netslim), cut to half of the multiply-adds or less, distil from the dense network")
    pruned = prune(dense, Recipe.load("quickstart"), workdir=folder)
    out.print(pruned.report)
    out.print("[bold]3.[/] what was promised")
    promises = _promises(dense, pruned, folder)
    table = Table("promise", "measured", "")
    for name, measured, kept in promises:
        table.add_row(name, measured, "[green]kept[/]" if kept else "[red]BROKEN[/]")
    out.print(table)
    out.print(f"[bold]4.[/] look at {folder / 'report.html'}", highlight=False)
    if not all(kept for _, _, kept in promises):
        raise SystemExit(1)


@torch.no_grad()
def _promises(dense: nn.Module, pruned: Pruned, folder: Path) -> list[tuple[str, str, bool]]:
    """Each with what was measured, and whether it was kept."""
    x = torch.cat([x for x, _ in loaders(Data(source="digits"))[1] or ()])
    zeroed = pruned.plan.zero_(copy.deepcopy(dense).double())
    sliced = pruned.plan.apply_(copy.deepcopy(dense).double())
    reloaded = load(copy.deepcopy(dense), folder)
    off = float((zeroed(x.double()) - sliced(x.double())).abs().max())
    bits = float((pruned.model(x) - reloaded(x)).abs().max())
    report = pruned.report
    left = report.pruned.macs / report.dense.macs
    lost = report.dense.metrics["accuracy"] - report.pruned.metrics["accuracy"]
    return [
        ("zeroed = sliced (double precision)", f"{off:.1e} apart", off < 1e-10),
        ("saved = reloaded, bit for bit", f"{bits:g} apart", bits == 0),
        ("half of the MACs or less", f"{left:.1%} left", left <= 0.5),
        ("within a point of the dense accuracy", f"{-100 * lost:+.2f} points", lost <= 0.01),
    ]
