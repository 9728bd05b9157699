"""Small networks to export, and one call from a dense model to checked files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import compress
from compress.cli.quickstart import Network
from compress.data.named_loaders import loaders
from compress.recipe import Data, Timing

SHORT_TIMING = Timing(repeats=6)
RECIPE: dict[str, Any] = {
    "target": {"round_to": 1},
    "budget": {"macs": "50%"},
    "search": "magnitude",
    "timing": {"repeats": 3},
}
IMAGES = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def small_network(width: int = 12) -> nn.Module:
    """Return an untrained network for digits; also a factory for the command line."""
    torch.manual_seed(0)
    return Network(width).eval()


def digit_loaders() -> tuple[Any, Any]:
    return loaders(Data(source="digits", batch_size=64))


def prune_and_export(folder: Path) -> compress.Pruned:
    """Prune the small network and export it in single precision and int8."""
    train, val = digit_loaders()
    recipe = RECIPE | {"export": {"int8": True}}
    return compress.prune(small_network(), recipe, train=train, val=val, workdir=folder, quiet=True)
