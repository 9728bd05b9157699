"""History of a search: quantiles of its scores, or its policy, and the costs of its scores, for the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch import Tensor

from compress.modules import module_mode

from .base import Job, Search
from .cost_history import CostHistory

SNAPSHOTS = 40  # of a search, about
COST_RECORDS = 100  # of a search, about
MAX_SINGLE_CHARTS = 9  # of single groups, with quantiles of their own
ALL_LEVELS, GROUP_LEVELS = np.linspace(0, 1, 21), np.linspace(0, 1, 11)  # levels of the quantiles


def record_costs(
    step: Callable[[Any], dict[str, Tensor]], search: Search, stage: str, costs: list[dict[str, Any]]
) -> Callable[[Any], dict[str, Tensor]]:
    """Return a step that also appends the costs of the scores to `costs`, about every hundredth of the search.

    Args:
        step: of the search.
        costs: CostHistory.to_dict() of each search and half of the data, continued if the search is resumed.
    """
    done, total = search.done, search.job.steps
    interval = max(1, total // COST_RECORDS)
    known = [(i, CostHistory.from_dict(data)) for i, data in enumerate(costs) if data["stage"] == stage]
    by_half = {history.half: (i, history) for i, history in known}

    def record() -> None:
        for half, sample in search.read_costs_().items():
            if half not in by_half:
                by_half[half] = len(costs), CostHistory(stage, half)
                costs.append({})
            i, history = by_half[half]
            history.append(done, sample)
            costs[i] = history.to_dict()

    def step_and_record(batch: Any) -> dict[str, Tensor]:
        nonlocal done
        terms = step(batch)
        done += 1
        if done % interval == 0 or done == total:
            record()
        return terms

    return step_and_record


def record_scores(search: Search, stage: str, snapshots: list[dict[str, Any]]) -> Callable[[Any], dict[str, Tensor]]:
    """Return the step of a search that also appends quantiles of the scores and the policy to `snapshots`.

    Snapshots are taken before the first step, about every fortieth of the search, and after the last step. The steps
    of a search that does not train run in eval mode.
    """
    done, total = search.done, search.job.steps
    interval = max(1, total // SNAPSHOTS)
    shown = spread_over_kinds(_kinds(search.job))

    def take_snapshot() -> None:
        scores, policy = search.scores(), search.policy()
        values = (score_quantiles(scores, shown) if scores else {}) | ({"policy": policy} if policy else {})
        if values:
            snapshots.append({"stage": stage, "step": done, **values})

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


def spread_over_kinds(kinds: Mapping[str, str], count: int = MAX_SINGLE_CHARTS) -> list[str]:
    """Choose names so that every kind has its share and each kind is spread from its first to its last name.

    Args:
        kinds: the kind of each name, in the network's order.
        count: how many to choose; all if there are not more.

    Returns:
        The chosen names, in the order given.
    """
    by_kind: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        by_kind.setdefault(kind, []).append(name)
    shares = dict.fromkeys(by_kind, 0)
    while sum(shares.values()) < min(count, len(kinds)):
        for kind, names in by_kind.items():
            if shares[kind] < len(names) and sum(shares.values()) < count:
                shares[kind] += 1
    chosen = {name for kind, names in by_kind.items() for name in _evenly_spaced(names, shares[kind])}
    return [name for name in kinds if name in chosen]


def _evenly_spaced(names: Sequence[str], count: int) -> list[str]:
    """Return the first, the last and names between; the middle one if there is to be one."""
    last = len(names) - 1
    return [names[last // 2]] if count == 1 else [names[i * last // (count - 1)] for i in range(count)]


def _kinds(job: Job) -> dict[str, str]:
    """Return the kind of each group that has scores."""
    if job.operations is not None:
        return dict.fromkeys(job.operations.candidates, "operations")
    return {group.name: group.kind_and_part for group in job.groups}


def score_quantiles(scores: Mapping[str, Tensor], shown: Sequence[str]) -> dict[str, Any]:
    """Return the quantiles of all scores together, and those of the groups that are shown one by one."""
    values = {name: score.detach().double().cpu().numpy() for name, score in scores.items()}
    groups = {name: _quantiles(values[name], GROUP_LEVELS) for name in shown if name in values}
    return {"all": _quantiles(np.concatenate([*values.values()]), ALL_LEVELS), "groups": groups}


def _quantiles(values: np.ndarray, levels: np.ndarray) -> list[float]:
    return [float(f"{value:.4g}") for value in np.quantile(values, levels)] if values.size else []
