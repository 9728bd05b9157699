"""Two halves of the training data, read side by side: what bilevel searches train weights and scores on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from .loading import length_of
from .task import BatchError

SAME = (  # settings of a loader that reads in another order
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers"),
)


class Pairs:
    """Batches of the two halves, two by two."""

    def __init__(self, first: Iterable[Any], second: Iterable[Any]) -> None:
        self.parts = [first, second]

    def __len__(self) -> int:
        return min(len(part) for part in self.parts)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(*self.parts, strict=False)


class Alternating:
    """Every other batch of a stream for each half."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader, self.parts = loader, [loader]

    def __len__(self) -> int:
        size = length_of(self.loader)
        if size is None:
            raise TypeError("the stream has no length")
        return size // 2

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        reader = iter(self.loader)
        return zip(reader, reader, strict=False)


def halves(loader: Iterable[Any], seed: int) -> Iterable[tuple[Any, Any]]:
    """Pairs of batches from two halves that share no sample.

    A loader with a `halves(seed)` splits itself. The dataset of a plain DataLoader is split at random, and each half is
    read with the loader's own settings; any other iterable gives its batches in turn, which keeps the halves apart
    within an epoch.

    Raises:
        BatchError: there is not enough to split.
    """
    if callable(own := getattr(loader, "halves", None)):  # a loader that knows how to split itself
        return Pairs(*own(seed))
    if isinstance(loader, Iterator):
        return zip(loader, loader, strict=False)
    plain = type(loader) is DataLoader and loader.batch_size is not None
    if not plain or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        size = length_of(loader)
        if size is not None and size < 2:
            raise BatchError(f"train: expected at least two batches, to be split in halves; the loader gives {size}")
        return Alternating(loader)
    if type(loader.sampler) not in (RandomSampler, SequentialSampler):
        return Alternating(loader)
    count = len(loader.dataset)  # type: ignore[arg-type]
    least = 2 * (loader.batch_size or 1) if loader.drop_last else 2
    if count < least:
        raise BatchError(f"train: expected at least {least} samples, to be split in halves; the dataset has {count}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return Pairs(*(_half(loader, sorted(part)) for part in (order[: count // 2], order[count // 2 : count // 2 * 2])))


def _half(loader: DataLoader[Any], indices: list[int]) -> DataLoader[Any]:
    settings = {name: getattr(loader, name) for name in ("batch_size", "drop_last", *SAME)}
    shuffle = isinstance(loader.sampler, RandomSampler)
    return DataLoader(Subset(loader.dataset, indices), shuffle=shuffle, **settings)
