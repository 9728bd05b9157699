"""Who reads what: each process its part of the data, each step its batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch.utils.data import DataLoader, IterableDataset

from .compute import Several
from .loading import length_of
from .processes import rank, world
from .split import SAME, Alternating, Pairs

AWARE = ("num_replicas", "world_size", "rank")  # what samplers that know about processes have


def shared(loader: Any, even: bool = True) -> Any:
    """This process's part of a loader: of N processes, each reads every N-th batch of a DataLoader.

    So a step reads what one process would with N times the batch size. `even` gives all the same number of batches, the
    last ones filled up from the first. A sampler that knows about processes divides the data itself, and any other
    iterable is taken to be this process's own.
    """
    if world() == 1 or loader is None:
        return loader
    if isinstance(loader, Pairs):
        return Pairs(*(shared(part, even) for part in loader.parts))
    if isinstance(loader, Alternating):
        return Alternating(shared(loader.loader, even))
    if type(loader) is not DataLoader or any(hasattr(loader.sampler, name) for name in AWARE):
        return loader
    common = {name: getattr(loader, name) for name in SAME}
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            return loader
        part = IterableDatasetShard(loader.dataset, loader.batch_size, loader.drop_last, world(), rank())
        return DataLoader(part, batch_size=loader.batch_size, drop_last=loader.drop_last, **common)
    if loader.batch_sampler is None or any(hasattr(loader.batch_sampler, name) for name in AWARE):
        return loader
    sampler = BatchSamplerShard(loader.batch_sampler, world(), rank(), even_batches=even)
    return DataLoader(loader.dataset, batch_sampler=sampler, **common)


class Accumulated:
    """Several batches at a time."""

    def __init__(self, loader: Any, count: int) -> None:
        self.loader, self.count = loader, count
        self.parts = getattr(loader, "parts", [loader])

    def __len__(self) -> int:
        size = length_of(self.loader)
        if size is None:
            raise TypeError("the stream has no length")
        return -(-size // self.count)

    def __iter__(self) -> Iterator[Any]:
        return _grouped(iter(self.loader), self.count, isinstance(self.loader, (Pairs, Alternating)))


def accumulated(loader: Iterable[Any], count: int, pairs: bool) -> Iterable[Any]:
    """So many batches at a time; of `pairs`, so many of each side."""
    if count == 1:
        return loader
    return _grouped(loader, count, pairs) if isinstance(loader, Iterator) else Accumulated(loader, count)


def _grouped(reader: Iterator[Any], count: int, pairs: bool) -> Iterator[Any]:
    while some := list(islice(reader, count)):
        yield tuple(Several(list(side)) for side in zip(*some, strict=True)) if pairs else Several(some)
