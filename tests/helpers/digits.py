"""A small trained network on scikit-learn's digits, and its loaders, for end-to-end tests."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils.data import DataLoader

from compress.cli.quickstart import Network, train_network
from compress.data.named_loaders import digits_datasets

SEARCH = {"method": "netslim", "epochs": 2, "lr": 0.02, "gamma": 1e-3}
FINETUNE = {"epochs": 4, "lr": 0.02, "distill": {"temperature": 4, "weight": 0.5}}
TIMING = {"repeats": 8, "batch_size": 8}
RECIPE: dict[str, Any] = {"budget": {"macs": "50%"}, "search": SEARCH, "finetune": FINETUNE, "timing": TIMING}
FOUR_STEPS: dict[str, Any] = {
    "budget": {"macs": "60%"},
    "search": {"method": "netslim", "epochs": "4 steps"},
    "finetune": {"epochs": "4 steps", "distill": {}},
    "timing": {"repeats": 3},
}


def loaders(batch: int = 64, count: int | None = None) -> tuple[DataLoader[Any], DataLoader[Any]]:
    train, val = digits_datasets()
    some = train if count is None else torch.utils.data.Subset(train, range(count))
    return DataLoader(some, batch, shuffle=True, drop_last=True), DataLoader(val, 180)


@cache
def _state() -> dict[str, torch.Tensor]:
    return train_network(epochs=5, width=16, quiet=True).state_dict()


def dense() -> Network:
    """A fresh copy of the trained network, in eval mode."""
    model = Network(16)
    model.load_state_dict(_state())
    return model.eval()
