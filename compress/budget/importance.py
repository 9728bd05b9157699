"""Importance of dimensions by group, as numpy arrays that are checked before use."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compress.graph import Groups

Int = NDArray[np.int64]
Float = NDArray[np.float64]
Importance = Mapping[str, NDArray[np.floating] | Tensor]


def checked_importance(groups: Groups, importance: Importance) -> dict[str, Float]:
    """Return the importance of every group as float64.

    Raises:
        ValueError: a group is missing, or its importance has the wrong shape or contains NaN.
    """
    return {g.name: _checked_values(g.name, g.width, importance) for g in groups}


def _checked_values(name: str, width: int, importance: Importance) -> Float:
    if name not in importance:
        raise ValueError(f"importance: group {name} is missing")
    value = importance[name]
    array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value, dtype=np.float64)
    if array.shape != (width,):
        raise ValueError(f"importance of {name}: expected {width} numbers, got shape {list(array.shape)}")
    if nan_count := int(np.isnan(array).sum()):
        first_nan = int(np.flatnonzero(np.isnan(array))[0])
        raise ValueError(
            f"importance of {name}: {nan_count} of {width} are NaN, the first at {first_nan}. "
            "Look for NaN in the model's weights and in the data; a search that trains may need a lower learning rate."
        )
    return array
