"""compress quickstart: train, search, cut, distil, save and reload a small network on scikit-learn's digits."""

from __future__ import annotations

import copy
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.table import Table
from torch import Tensor, nn

from compress.api import Pruned, prune
from compress.data import loaders
from compress.progress import ProgressDisplay
from compress.recipe import Data, Recipe
from compress.surgery import load

from .options import console


class ResidualBlock(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(x + residual)


class Network(nn.Sequential):
    """A small residual network for grayscale images."""

    def __init__(self, width: int = 32) -> None:
        stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        down = nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU())
        stage1, stage2 = (nn.Sequential(ResidualBlock(w), ResidualBlock(w)) for w in (width, 2 * width))
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))
        super().__init__(OrderedDict(stem=stem, stage1=stage1, down=down, stage2=stage2, head=head))


def train_network(epochs: int = 8, width: int = 32, quiet: bool = False) -> Network:
    """Train a network on the digits in a plain PyTorch loop."""
    with torch.random.fork_rng(devices=[]), ProgressDisplay(quiet) as display:
        torch.manual_seed(0)
        train, _ = loaders(Data(source="digits", batch_size=64))
        model, steps = Network(width), epochs * len(train)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps)
        with display.bar("training the dense network", steps) as bar:
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


class Check(NamedTuple):
    """A property of the result, with its measurement."""

    name: str
    measured: str
    passed: bool


def quickstart(
    workdir: Annotated[
        Path | None, typer.Option("--workdir", help="folder for the result", show_default="a new folder")
    ] = None,
) -> None:
    """Train a small residual network on handwritten digits, prune it to half the MACs, distil, and check the result."""
    folder = workdir or Path(tempfile.mkdtemp(prefix="compress-")) / "quickstart"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            f"--workdir {folder}: expected an empty or missing directory, because the quickstart cannot be resumed; "
            "choose another, or leave --workdir out for a new one"
        )
    console.print("[bold]1.[/] train a residual network on scikit-learn's 1797 handwritten digits")
    dense = train_network()
    console.print("[bold]2.[/] search (netslim), cut to half of the MACs or less, distil from the dense network")
    pruned = prune(dense, Recipe.load("quickstart"), workdir=folder)
    console.print(pruned.report)
    console.print("[bold]3.[/] check the result")
    checks = _check_result(dense, pruned, folder)
    table = Table("check", "measured", "")
    for check in checks:
        table.add_row(check.name, check.measured, "[green]passed[/]" if check.passed else "[red]FAILED[/]")
    console.print(table)
    console.print(f"[bold]4.[/] open {folder / 'report.html'}", highlight=False)
    if not all(check.passed for check in checks):
        raise SystemExit(1)


@torch.no_grad()
def _check_result(dense: nn.Module, pruned: Pruned, folder: Path) -> list[Check]:
    """Check that slicing and reloading are exact, that the budget is met and that the accuracy is kept."""
    images = torch.cat([x for x, _ in loaders(Data(source="digits"))[1] or ()])
    zeroed = pruned.plan.zero_(copy.deepcopy(dense).double())
    sliced = pruned.plan.apply_(copy.deepcopy(dense).double())
    reloaded = load(copy.deepcopy(dense), folder)
    slicing_error = float((zeroed(images.double()) - sliced(images.double())).abs().max())
    reload_error = float((pruned.model(images) - reloaded(images)).abs().max())
    report = pruned.report
    remaining_macs = report.pruned.macs / report.dense.macs
    lost_accuracy = report.dense.metrics["accuracy"] - report.pruned.metrics["accuracy"]
    return [
        Check("zeroed = sliced (double precision)", f"{slicing_error:.1e} apart", slicing_error < 1e-10),
        Check("saved = reloaded, bit for bit", f"{reload_error:g} apart", reload_error == 0),
        Check("half of the MACs or less", f"{remaining_macs:.1%} left", remaining_macs <= 0.5),
        Check("within a point of the dense accuracy", f"{-100 * lost_accuracy:+.2f} points", lost_accuracy <= 0.01),
    ]
