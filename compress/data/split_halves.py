"""Two halves of the training data: bilevel searches train weights on one and scores on the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from compress.errors import BatchError

from .batches import num_batches

LOADER_SETTINGS = (  # copied to a loader that reads in another order
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers"),
)


class PairedLoader:
    """A loader of pairs of batches, one from each of two loaders."""

    def __init__(self, first: Iterable[Any], second: Iterable[Any]) -> None:
        self.parts = [first, second]

    def __len__(self) -> int:
        return min(len(part) for part in self.parts)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(*self.parts, strict=False)


class AlternatingLoader:
    """A loader of pairs of consecutive batches of one loader."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader, self.parts = loader, [loader]

    def __len__(self) -> int:
        size = num_batches(self.loader)
        if size is None:
            raise TypeError("the loader has no length")
        return size // 2

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        reader = iter(self.loader)
        return zip(reader, reader, strict=False)


def split_into_halves(loader: Iterable[Any], seed: int) -> Iterable[tuple[Any, Any]]:
    """Return a loader of pairs of batches from two halves that share no sample.

    A loader with a method `halves(seed)` splits itself. The dataset of a plain DataLoader is split at random, and each
    half is read with the loader's settings. Any other iterable gives its batches to the two halves in turn, which
    separates them within an epoch.

    Raises:
        BatchError: there are too few batches or samples to split.
    """
    if callable(own_halves := getattr(loader, "halves", None)):
        return PairedLoader(*own_halves(seed))
    if isinstance(loader, Iterator):
        return zip(loader, loader, strict=False)
    plain = type(loader) is DataLoader and loader.batch_size is not None
    if not plain or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        size = num_batches(loader)
        if size is not None and size < 2:
            raise BatchError(f"train: expected at least two batches to split into halves; the loader gives {size}")
        return AlternatingLoader(loader)
    if type(loader.sampler) not in (RandomSampler, SequentialSampler):
        return AlternatingLoader(loader)
    count = len(loader.dataset)  # type: ignore[arg-type]
    least = 2 * (loader.batch_size or 1) if loader.drop_last else 2
    if count < least:
        raise BatchError(f"train: expected at least {least} samples to split into halves; the dataset has {count}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return PairedLoader(
        *(_half(loader, sorted(part)) for part in (order[: count // 2], order[count // 2 : count // 2 * 2]))
    )


def _half(loader: DataLoader[Any], indices: list[int]) -> DataLoader[Any]:
    settings = {name: getattr(loader, name) for name in ("batch_size", "drop_last", *LOADER_SETTINGS)}
    shuffle = isinstance(loader.sampler, RandomSampler)
    return DataLoader(Subset(loader.dataset, indices), shuffle=shuffle, **settings)
