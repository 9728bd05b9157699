"""Batches of digits, as a list and as an endless stream."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from helpers.digits import loaders


class EndlessDataset(IterableDataset[Any]):
    """No length, as of a stream."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def digit_batches() -> list[Any]:
    return [(x, y) for x, y in loaders(count=256)[0]]
