"""Ranking of dimensions across groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from compress.graph import Groups
from compress.recipe import Ranking

from .bounds import WidthBounds
from .importance import Float, Importance, Int, checked_importance
from .units import UNITS

EVEN_COSTS = 6.0  # `balanced`: costs of a dimension that differ by no more than this factor are about the same
LEAST_SHARE = 2 / 3  # `bounded`: what a group keeps at least, relative to all


@dataclass(frozen=True)
class RankedDimensions:
    """Dimensions of all groups, best first, and the allowed widths that keep the best of them."""

    names: tuple[str, ...]
    orders: list[Int]  # of each group: its dimensions, best first
    owners: Int  # group index of the best dimension, of the second best, ...; without those above their group's bound
    bounds: WidthBounds

    @classmethod
    def of(
        cls, groups: Groups, importance: Importance, bounds: WidthBounds, ranking: Ranking, unit: str
    ) -> RankedDimensions:
        """Rank the dimensions of all groups within their bounds.

        Raises:
            ValueError: importance is missing, has the wrong shape or contains NaN; or the ranking is unknown.
        """
        names = groups.cost.names
        values, ranked = (
            checked_importance(groups, importance),
            comparable_importance(groups, importance, ranking, unit),
        )
        orders = [_order_by_importance(values[g.name], g.num_heads) for g in groups]
        leveled = [
            _average_over_heads(ranked[g.name][order], g.num_heads) for g, order in zip(groups, orders, strict=True)
        ]
        owners = np.repeat(np.arange(len(names)), bounds.most)
        within_bounds = [value[:most] for value, most in zip(leveled, bounds.most, strict=True)]
        best_first = np.argsort(-np.concatenate([np.zeros(0), *within_bounds]), kind="stable")
        return cls(names, orders, owners[best_first], bounds)

    @property
    def count(self) -> int:
        """Number of ranked dimensions."""
        return len(self.owners)

    def widths(self, count: int) -> Int:
        """Return the allowed widths that keep the `count` best dimensions of all groups."""
        return self.bounds.round_up(np.bincount(self.owners[:count], minlength=len(self.names)))

    def keep(self, widths: Int) -> dict[str, Int]:
        """Return the indices of the best dimensions of each group, as many as its width."""
        return {name: np.sort(self.orders[i][: widths[i]]) for i, name in enumerate(self.names)}


def _order_by_importance(value: Float, num_heads: int) -> Int:
    """Return the dimensions, best first; with several heads, the best of each head, then the second best of each."""
    within_head = np.argsort(-value.reshape(num_heads, -1), axis=1, kind="stable")
    order: Int = (within_head + np.arange(num_heads)[:, None] * within_head.shape[1]).T.ravel()
    return order


def _average_over_heads(ranked: Float, num_heads: int) -> Float:
    """Give dimensions that are dropped together, one of each head, their mean importance."""
    return np.repeat(ranked.reshape(-1, num_heads).mean(1), num_heads)


def comparable_importance(groups: Groups, importance: Importance, ranking: Ranking, unit: str) -> dict[str, Float]:
    """Make importance comparable across groups.

    `global` takes importance as it is. `group` divides by the mean magnitude within the group. `cost` divides by the
    fraction of the network's cost that one dimension takes, in the budget's unit or else in MACs; dimensions without
    cost come first. `lamp` does the same with the LAMP score in place of importance: the root of a dimension's share
    in the sum over dimensions that are at least as important in its group (Lee et al., Layer-adaptive sparsity for the
    magnitude-based pruning, ICLR 2021), so that no group is emptied before the others. `bounded` ranks as `global`, but
    the k-th best of the n dimensions of a group counts as one of the best 3/2 k/n of all. `balanced` is
    `lamp` if the costs of a dimension differ by a factor of `EVEN_COSTS` at most, else `bounded`: per cost, the first
    layers of a network for large images would be emptied, because a dimension of them costs a hundred times as much.

    Raises:
        ValueError: importance is missing, has the wrong shape or contains NaN; or the ranking is unknown.
    """
    values = checked_importance(groups, importance)
    cost_unit = UNITS[unit].for_ranking
    per_dimension = cost_unit.cost_per_dimension(groups)
    if ranking == "balanced":
        costs = per_dimension[per_dimension > 0]
        ranking = "lamp" if not costs.size or costs.max() <= EVEN_COSTS * costs.min() else "bounded"
    if ranking == "global":
        return values
    if ranking == "bounded":
        return _bounded_ranks(values)
    if ranking == "group":
        return {name: value / _mean_magnitude(value) for name, value in values.items()}
    if ranking == "lamp":
        values = {name: _lamp_score(value) for name, value in values.items()}
    elif ranking != "cost":
        raise ValueError(f"ranking: expected balanced, bounded, cost, global, group or lamp; got {ranking!r}")
    total = int(cost_unit.cost_of_widths(groups)(groups.cost.widths))
    return {
        name: values[name] / (cost / total) if cost else np.full(len(values[name]), np.inf)
        for name, cost in zip(groups.cost.names, per_dimension.tolist(), strict=True)
    }


def _bounded_ranks(values: Mapping[str, Float]) -> dict[str, Float]:
    """Return minus the fraction of all dimensions that are kept when a dimension is, 3/2 of its group's at most."""
    overall = _kept_fractions(np.concatenate([np.zeros(0), *values.values()]))
    starts = np.cumsum([len(value) for value in values.values()])[:-1]
    return {
        name: -np.minimum(fraction, _kept_fractions(value) / LEAST_SHARE)
        for (name, value), fraction in zip(values.items(), np.split(overall, starts), strict=True)
    }


def _kept_fractions(value: Float) -> Float:
    """Return the fraction of values that are kept if a value and all better ones are: 1 for the smallest."""
    fractions = np.empty(len(value))
    fractions[np.argsort(-value, kind="stable")] = np.arange(1, len(value) + 1) / max(len(value), 1)
    return fractions


def _lamp_score(value: Float) -> Float:
    """Return the root of each value's share in the sum of values no smaller: 1 for the largest; infinity stays."""
    sizes = np.where(np.isfinite(value), np.maximum(value, 0), 0)
    order = np.argsort(-sizes, kind="stable")
    sums = np.maximum(np.cumsum(sizes[order]), np.finfo(np.float64).tiny)
    score = np.empty_like(sizes)
    score[order] = np.sqrt(sizes[order] / sums)
    return np.where(np.isposinf(value), np.inf, score)


def _mean_magnitude(value: Float) -> float:
    """Return the mean of the finite absolute values; never zero."""
    sizes = np.abs(value[np.isfinite(value)])
    return max(float(sizes.mean()) if sizes.size else 0.0, float(np.finfo(np.float64).tiny))
