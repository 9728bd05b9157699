"""Checkpoints of mmengine's Runner hold a few things beside tensors; torch is told that these can be read safely.

Without it, torch 2.6 and later refuse the Runner's own checkpoints, for resuming as well as for their weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from numpy._core import multiarray

STATISTICS = ("min", "max", "current", "mean")


def _statistic(owner: Any, name: str) -> Any:
    """A method of a log's history: all that a checkpoint may look up by `getattr`.

    Raises:
        ValueError: it looks for something else.
    """
    if owner is not HistoryBuffer or name not in STATISTICS:
        raise ValueError(f"the checkpoint asks for {name} of {owner}: not what mmengine writes, and not read")
    return getattr(HistoryBuffer, name)


def allow() -> None:
    """Let torch read histories of logged values, and the arrays they are made of."""
    kinds = [type(np.dtype(kind)) for kind in (np.float32, np.float64, np.int32, np.int64, np.bool_)]
    rebuild = [(multiarray._reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    rebuild += [(multiarray.scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    names = [(_statistic, f"{module}.getattr") for module in ("builtins", "__builtin__")]
    torch.serialization.add_safe_globals([HistoryBuffer, np.ndarray, np.dtype, *kinds, *rebuild, *names])
