"""Sharding: the part of a loader that this process reads."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from compress.distributed import rank, world_size

from .split_halves import LOADER_SETTINGS, AlternatingLoader, PairedLoader

SHARDING_ATTRIBUTES = ("num_replicas", "world_size", "rank")  # of samplers that shard the data themselves


def shards_itself(loader: Any) -> bool:
    """Return whether a DataLoader gives each process its own part of the data, by its sampler."""
    samplers = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    return any(hasattr(sampler, name) for sampler in samplers for name in SHARDING_ATTRIBUTES)


def shard_loader(loader: Any, even_batches: bool = True) -> Any:
    """Return this process's part of a loader: every N-th batch of a DataLoader, for N processes.

    So a step of all processes reads what one process would read with N times the batch size. A loader whose sampler
    shards the data, and any iterable that is not a DataLoader, is returned as it is.

    Args:
        even_batches: give all processes the same number of batches, filling up the last ones from the first.
    """
    if world_size() == 1 or loader is None:
        return loader
    if isinstance(loader, PairedLoader):
        return PairedLoader(*(shard_loader(part, even_batches) for part in loader.parts))
    if isinstance(loader, AlternatingLoader):
        return AlternatingLoader(shard_loader(loader.loader, even_batches))
    if type(loader) is not DataLoader or any(hasattr(loader.sampler, name) for name in SHARDING_ATTRIBUTES):
        return loader
    common = {name: getattr(loader, name) for name in LOADER_SETTINGS}
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            return loader
        from accelerate.data_loader import IterableDatasetShard

        part = IterableDatasetShard(loader.dataset, loader.batch_size, loader.drop_last, world_size(), rank())
        return DataLoader(part, batch_size=loader.batch_size, drop_last=loader.drop_last, **common)
    if loader.batch_sampler is None or any(hasattr(loader.batch_sampler, name) for name in SHARDING_ATTRIBUTES):
        return loader
    from accelerate.data_loader import BatchSamplerShard

    sampler = BatchSamplerShard(loader.batch_sampler, world_size(), rank(), even_batches=even_batches)
    return DataLoader(loader.dataset, batch_sampler=sampler, **common)
