"""Random batches of data that a loader gives in order."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, SequentialSampler

from .split_halves import LOADER_SETTINGS


def shuffled_loader(loader: Any) -> Any:
    """Return a DataLoader that shuffles what this one gives in order; any other loader as it is.

    The first batches of a folder of classes hold the first classes only; those of the shuffled loader hold all.
    """
    if type(loader) is not DataLoader or type(loader.sampler) is not SequentialSampler or loader.batch_size is None:
        return loader
    common = {name: getattr(loader, name) for name in LOADER_SETTINGS}
    return DataLoader(loader.dataset, loader.batch_size, shuffle=True, drop_last=loader.drop_last, **common)
