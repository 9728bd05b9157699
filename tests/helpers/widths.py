"""Random importance for groups, and the widths that a choice leaves."""

from __future__ import annotations

from typing import Any

import numpy as np

from compress.graph import Groups

BUDGET_CASES = [
    "chain",
    "residual_stream_with_projection",
    "dense_connections",
    "few_large_groups",
    "many_small_groups",
]


def random_importance(groups: Groups, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {g.name: random.random(g.width) for g in groups}


def widths_of(groups: Groups, keep: dict[str, Any]) -> np.ndarray:
    return np.array([len(keep[name]) for name in groups.cost.names])
