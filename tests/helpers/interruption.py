"""Runs that are interrupted at a chosen batch, and one that is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

import compress
from compress.training import engine as engine_module
from helpers.digits import FINETUNE, RECIPE, dense, loaders

SHORT_RECIPE: dict[str, Any] = {
    **RECIPE,
    "search": {**RECIPE["search"], "epochs": "6 steps"},
    "finetune": {**FINETUNE, "epochs": "8 steps", "ema": 0.9, "mixup": 0.2},
}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C at a moment of our choosing."""


class InterruptedLoader:
    """A loader that is interrupted when the n-th batch is asked for, counted over all epochs and stages."""

    def __init__(self, loader: DataLoader[Any], after: int) -> None:
        self.loader, self.left = loader, after
        self.batch_sampler = loader.batch_sampler  # which is seeded wherever it is seen

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if self.left == 0:
                raise Interrupted
            self.left -= 1
            yield batch


def save_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the engine to save a checkpoint behind every step."""
    monkeypatch.setattr(engine_module, "SAVE_INTERVAL", -1.0)
    original = engine_module.Engine.save

    def save(self: Any, *args: Any) -> None:
        original(self, *args)
        self._save_seconds = 0.0

    monkeypatch.setattr(engine_module.Engine, "save", save)


def small_loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return loaders(batch=64, count=256)


def uninterrupted_run() -> compress.Pruned:
    train, val = small_loaders()
    return compress.prune(dense(), SHORT_RECIPE, train=train, val=val, quiet=True)
