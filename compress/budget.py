"""From importance and a budget to what is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .groups import Groups
from .recipe import Budget, Target

Int = NDArray[np.int64]


class BudgetError(ValueError):
    """A budget that no choice of widths can meet."""


@dataclass(frozen=True)
class Bounds:
    """The widths that a group may get: `least`, the multiples of `round_to` above it, and the full width."""

    least: Int
    full: Int
    round_to: int

    @classmethod
    def of(cls, groups: Groups, target: Target) -> Bounds:
        full = groups.cost.widths
        least = np.minimum(-(-target.min_keep // target.round_to) * target.round_to, full)
        return cls(np.maximum(least, 1), full, target.round_to)

    def up(self, kept: Int) -> Int:
        """The next allowed width above."""
        rounded = -(-np.maximum(kept, self.least) // self.round_to) * self.round_to
        allowed: Int = np.minimum(rounded, self.full)
        return allowed


def percent(fraction: float) -> str:
    """Rounded up to four digits: a budget that is named as reachable can be reached."""
    digits = 3 - math.floor(math.log10(100 * fraction)) if fraction > 0 else 0
    return f"{math.ceil(round(100 * fraction * 10**digits, 6)) / 10**digits:.4g}%"


def smallest(groups: Groups, budget: Budget, target: Target) -> float:
    """The fraction that is left when every group is cut as far as it may be."""
    measure = getattr(groups.cost, budget.unit)
    whole = int(measure(groups.cost.widths))
    return int(measure(Bounds.of(groups, target).least)) / whole if whole else 1.0


def choose(
    groups: Groups, importance: Mapping[str, NDArray[np.floating] | Tensor], budget: Budget, target: Target
) -> dict[str, Int]:
    """Keep the most important dimensions over all groups that the budget has room for.

    The cost of what is kept never exceeds the budget, and no group could keep one step (`round_to` dimensions) more
    without exceeding it. The widths are found by bisection on the global ranking; what room is left is then given to
    the groups in the order of their next best dimension.

    Raises:
        BudgetError: the budget is out of reach; the message names the smallest that is not.
        ValueError: importance is missing, of another width, or not a number.
    """
    ranked = {g.name: _checked(g.name, g.width, importance) for g in groups}
    bounds, cost = Bounds.of(groups, target), groups.cost
    measure = getattr(cost, budget.unit)
    limit = math.floor(budget.left * int(measure(cost.widths)) * (1 + 1e-12))  # 0.29 * 100 is a hair below 29
    if int(measure(bounds.least)) > limit:
        raise BudgetError(
            f"budget.{budget.unit}: {percent(budget.left)} of the dense network cannot be reached; the smallest that "
            f"can is {percent(smallest(groups, budget, target))} "
            f"({len(groups)} groups offered, {len(groups.refused)} refused). "
            "Raise the budget, allow more in target, or lower target.min_keep."
        )
    if not len(groups):
        return {}
    orders = [np.argsort(-ranked[name], kind="stable") for name in cost.names]
    values = np.concatenate([ranked[name][order] for name, order in zip(cost.names, orders, strict=True)])
    owner = np.repeat(np.arange(len(cost.names)), cost.widths)
    ranking = owner[np.argsort(-values, kind="stable")]  # the group of the best dimension, of the second best ...

    def widths(taken: int) -> Int:
        return bounds.up(np.bincount(ranking[:taken], minlength=len(cost.names)))

    low, high = 0, len(ranking)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int(measure(widths(middle))) <= limit else (low, middle - 1)
    kept = _fill(widths(low), bounds, measure, limit, ranking)
    return {name: np.sort(orders[i][: kept[i]]) for i, name in enumerate(cost.names)}


def _fill(kept: Int, bounds: Bounds, measure: Callable[[Int], Any], limit: int, ranking: Int) -> Int:
    """Widen groups one after the other, best next dimension first, as far as the budget has room."""
    ranks = np.argsort(ranking, kind="stable")  # rank of each dimension, group after group
    starts = np.concatenate([[0], np.cumsum(bounds.full)])
    open_groups = [g for g in range(len(kept)) if kept[g] < bounds.full[g]]
    for g in sorted(open_groups, key=lambda g: int(ranks[starts[g] + kept[g]])):
        low, high = 0, int(-(-(bounds.full[g] - kept[g]) // bounds.round_to))
        while low < high:
            middle = (low + high + 1) // 2
            room = int(measure(_widened(kept, g, middle, bounds))) <= limit
            low, high = (middle, high) if room else (low, middle - 1)
        kept = _widened(kept, g, low, bounds)
    return kept


def _widened(kept: Int, g: int, steps: int, bounds: Bounds) -> Int:
    wider = kept.copy()
    wider[g] = min(kept[g] + steps * bounds.round_to, bounds.full[g])
    return wider


def _checked(name: str, width: int, importance: Mapping[str, NDArray[np.floating] | Tensor]) -> NDArray[np.float64]:
    if name not in importance:
        raise ValueError(f"importance: group {name} is missing")
    value = importance[name]
    array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value, dtype=np.float64)
    if array.shape != (width,):
        raise ValueError(f"importance of {name}: expected {width} numbers, got shape {list(array.shape)}")
    if bad := int(np.isnan(array).sum()):
        raise ValueError(
            f"importance of {name}: {bad} of {width} are NaN, the first at {int(np.flatnonzero(np.isnan(array))[0])}. "
            "The search diverged: lower its learning rate, or look for NaN in the data."
        )
    return array
