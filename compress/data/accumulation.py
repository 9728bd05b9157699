"""Gradient accumulation: loaders that give several batches per step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from .batches import loader_parts, num_batches
from .micro_batches import AccumulatedBatch
from .split_halves import AlternatingLoader, PairedLoader


class AccumulatingLoader:
    """A loader that gives `count` batches at a time, as an `AccumulatedBatch`."""

    def __init__(self, loader: Any, count: int) -> None:
        self.loader, self.count = loader, count
        self.parts = loader_parts(loader)

    def __len__(self) -> int:
        size = num_batches(self.loader)
        if size is None:
            raise TypeError("the loader has no length")
        return -(-size // self.count)

    def __iter__(self) -> Iterator[Any]:
        return _group_batches(iter(self.loader), self.count, isinstance(self.loader, (PairedLoader, AlternatingLoader)))


def accumulate_batches(loader: Iterable[Any], count: int, pairs: bool) -> Iterable[Any]:
    """Return a loader that gives `count` batches at a time; of `pairs`, `count` of each side."""
    if count == 1:
        return loader
    return _group_batches(loader, count, pairs) if isinstance(loader, Iterator) else AccumulatingLoader(loader, count)


def _group_batches(reader: Iterator[Any], count: int, pairs: bool) -> Iterator[Any]:
    while batches := list(islice(reader, count)):
        if pairs:
            yield tuple(AccumulatedBatch(list(side)) for side in zip(*batches, strict=True))
        else:
            yield AccumulatedBatch(batches)
