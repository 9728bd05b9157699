"""Allow torch to load checkpoints of mmengine's Runner with `weights_only=True`.

They contain histories of logged values next to the tensors. Without this, torch 2.6 and later refuse them, both for
resuming and for their weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from numpy._core import multiarray

HISTORY_STATISTICS = ("min", "max", "current", "mean")


def _history_statistic(owner: Any, name: str) -> Any:
    """Return a statistic method of `HistoryBuffer`: the only attribute lookup that a checkpoint may do.

    Raises:
        ValueError: the checkpoint looks up something else.
    """
    if owner is not HistoryBuffer or name not in HISTORY_STATISTICS:
        raise ValueError(f"the checkpoint asks for {name} of {owner}, which mmengine does not write; it is not loaded")
    return getattr(HistoryBuffer, name)


def allow_runner_checkpoints() -> None:
    """Register histories of logged values, and the numpy arrays in them, as safe to load.

    Each class is registered with its name. Registered alone, it would be forgotten when another library leaves a
    `torch.serialization.safe_globals` that lists the same class, as transformers' Trainer does when it resumes.
    """
    dtypes = [type(np.dtype(kind)) for kind in (np.float32, np.float64, np.int32, np.int64, np.bool_)]
    classes = (HistoryBuffer, np.ndarray, np.dtype, *dtypes)
    named = [(known, f"{known.__module__}.{known.__qualname__}") for known in classes]
    rebuild = [(multiarray._reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    rebuild += [(multiarray.scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    getattrs = [(_history_statistic, f"{module}.getattr") for module in ("builtins", "__builtin__")]
    torch.serialization.add_safe_globals([*named, *rebuild, *getattrs])
