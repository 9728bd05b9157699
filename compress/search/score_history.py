"""History of the scores: their quantiles at some steps of a search, for the charts of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch import Tensor

from compress.modules import module_mode

from .base import Search

SNAPSHOTS = 40  # of a search, about
LARGEST_GROUPS = 9  # with quantiles of their own
ALL_LEVELS, GROUP_LEVELS = np.linspace(0, 1, 21), np.linspace(0, 1, 11)  # levels of the quantiles


def record_scores(search: Search, stage: str, snapshots: list[dict[str, Any]]) -> Callable[[Any], dict[str, Tensor]]:
    """Return the step of a search that also appends quantiles of the scores to `snapshots`.

    Snapshots are taken before the first step, about every fortieth of the search, and after the last step. The steps
    of a search that does not train run in eval mode.
    """
    done, total = search.done, search.job.steps
    interval = max(1, total // SNAPSHOTS)

    def take_snapshot() -> None:
        if scores := search.scores():
            snapshots.append({"stage": stage, "step": done, **score_quantiles(scores)})

    def step(batch: Any) -> dict[str, Tensor]:
        nonlocal done
        if done == 0:
            take_snapshot()
        with nullcontext() if search.trains else module_mode(search.job.model, training=False):
            terms = search.step(batch)
        done += 1
        if done % interval == 0 or done == total:
            take_snapshot()
        return terms

    return step


def score_quantiles(scores: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the quantiles of all scores together, and those of the largest groups by name."""
    values = {name: score.detach().double().cpu().numpy() for name, score in scores.items()}
    largest = sorted(values, key=lambda name: -values[name].size)[:LARGEST_GROUPS]
    groups = {name: _quantiles(values[name], GROUP_LEVELS) for name in values if name in largest}
    return {"all": _quantiles(np.concatenate([*values.values()]), ALL_LEVELS), "groups": groups}


def _quantiles(values: np.ndarray, levels: np.ndarray) -> list[float]:
    return [float(f"{value:.4g}") for value in np.quantile(values, levels)] if values.size else []
