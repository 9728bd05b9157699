"""Watch: how the scores spread as a search goes on, in quantiles, at some moments of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from .search import Search

MOMENTS = 40  # of a search, about
WIDEST = 9  # groups that are watched one by one
EVERY, EACH = np.linspace(0, 1, 21), np.linspace(0, 1, 11)  # levels of the quantiles of all scores, and of a group's


def watched(search: Search, name: str, moments: list[dict[str, Any]]) -> Callable[[Any], dict[str, Tensor]]:
    """The step of a search; how its scores spread is written down before the first step, on the way, and at the end."""
    done, total = search.done, search.job.steps
    apart = max(1, total // MOMENTS)

    def look() -> None:
        if scores := search.scores():
            moments.append({"stage": name, "step": done, **spread(scores)})

    def step(batch: Any) -> dict[str, Tensor]:
        nonlocal done
        if done == 0:
            look()
        terms = search.step(batch)
        done += 1
        if done % apart == 0 or done == total:
            look()
        return terms

    return step


def spread(scores: Mapping[str, Tensor]) -> dict[str, Any]:
    """Quantiles of all scores together, and of those of the widest groups."""
    values = {name: score.detach().double().cpu().numpy() for name, score in scores.items()}
    widest = sorted(values, key=lambda name: -values[name].size)[:WIDEST]
    groups = {name: _quantiles(values[name], EACH) for name in values if name in widest}
    return {"all": _quantiles(np.concatenate([*values.values()]), EVERY), "groups": groups}


def _quantiles(values: np.ndarray, levels: np.ndarray) -> list[float]:
    return [float(f"{value:.4g}") for value in np.quantile(values, levels)] if values.size else []
