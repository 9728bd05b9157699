"""Limits of a budget as costs that widths may have at most."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from compress.errors import BudgetError
from compress.graph import Groups
from compress.recipe import Budget, Quantity, format_limit

from .importance import Int
from .units import UNITS, CostOfWidths


@dataclass(frozen=True)
class CostLimit:
    """A cost that widths may have at most."""

    unit: str
    cost_of: CostOfWidths
    allowed: int
    current: int  # cost of the network before the cut

    @classmethod
    def of(cls, unit: str, cost_of: CostOfWidths, allowed: float, groups: Groups) -> CostLimit:
        """Return a limit; `allowed` may be a product of floats, such as 0.29 * 100, which is slightly below 29."""
        return cls(unit, cost_of, math.floor(allowed * (1 + 1e-12)), int(cost_of(groups.cost.widths)))

    def used(self, widths: Int) -> float:
        """Return the cost of these widths as a fraction of what is allowed."""
        return int(self.cost_of(widths)) / max(1, self.allowed)


@dataclass(frozen=True)
class CostLimits:
    """All computed limits of a budget."""

    limits: tuple[CostLimit, ...]

    def fit(self, widths: Int) -> bool:
        """Return whether these widths are within every limit."""
        return all(int(limit.cost_of(widths)) <= limit.allowed for limit in self.limits)

    @property
    def ranking_unit(self) -> str:
        """Unit that importance per cost is ranked in: that of the limit which leaves the smallest fraction."""
        return min(self.limits, key=lambda limit: limit.allowed / max(1, limit.current)).unit


def dense_costs(groups: Groups, budget: Budget) -> dict[str, float]:
    """Return the cost of the network in each computed unit of a budget."""
    widths = groups.cost.widths
    return {unit: int(UNITS[unit].cost_of_widths(groups)(widths)) for unit in budget.computed_units}


def remaining_fractions(budget: Budget, dense: Mapping[str, float]) -> dict[str, float]:
    """Return each limit as a fraction of the dense network, at most 1.

    Args:
        budget: fractions, or absolute amounts.
        dense: cost of the dense network in the units of absolute limits, latency in milliseconds.
    """
    return {
        unit: min(1.0, limit.amount / max(dense[unit], 1e-12)) if isinstance(limit, Quantity) else limit
        for unit, limit in budget.limits.items()
    }


def computed_limits(
    groups: Groups,
    budget: Budget,
    limits: Mapping[str, float] | None = None,
    estimated_latency: CostOfWidths | None = None,
) -> CostLimits:
    """Return the limits of a budget on a network.

    Args:
        groups: the groups of the network.
        budget: the budget; its absolute amounts and fractions refer to this network if there are no `limits`.
        limits: unit -> cost that may be left.
        estimated_latency: the latency of widths, if it is estimated and not measured.

    Raises:
        ValueError: the budget is a latency, and there is no estimate.
    """
    if limits is None:
        dense = dense_costs(groups, budget)
        computed = budget.model_copy(update={"latency": None})
        limits = {unit: fraction * dense[unit] for unit, fraction in remaining_fractions(computed, dense).items()}
    costs = {unit: UNITS[unit].cost_of_widths(groups) for unit in budget.computed_units}
    if budget.is_measured and estimated_latency is not None:
        costs["latency"] = estimated_latency
    if not costs:
        UNITS[budget.unit].cost_of_widths(groups)  # raises
    return CostLimits(tuple(CostLimit.of(unit, cost_of, limits[unit], groups) for unit, cost_of in costs.items()))


def check_asks_for_less(budget: Budget, dense: Mapping[str, float]) -> None:
    """Check that an absolute budget is less than the dense network has, in one unit at least.

    Raises:
        BudgetError: every limit is absolute, and the dense network is within all of them.
    """
    amounts = {unit: limit for unit, limit in budget.limits.items() if isinstance(limit, Quantity)}
    if amounts and len(amounts) == len(budget.limits) and all(q.amount >= dense[u] for u, q in amounts.items()):
        texts = (f"{unit}: {q}; the dense network has {UNITS[unit].format(dense[unit])}" for unit, q in amounts.items())
        raise BudgetError(f"budget.{' and '.join(texts)}, so there is nothing to prune. Lower the budget")


def describe_use(used: Mapping[str, float], fractions: Mapping[str, float], budget: Budget) -> str:
    """Return a note about a budget of several limits: the tight one, and what is left by each.

    Args:
        used: unit -> cost of the pruned network as a fraction of the dense network's; units that are not known lack.
        fractions: unit -> limit as a fraction of the dense network.
        budget: the limits as they were given.

    >>> describe_use({"macs": 0.5, "params": 0.2}, {"macs": 0.5, "params": 0.3}, Budget(macs=0.5, params=0.3))
    'budget: macs is the tight limit; left are macs 50% (limit 50%), params 20% (limit 30%)'
    """
    tight = max(used, key=lambda unit: used[unit] / fractions[unit])
    left = ", ".join(f"{u} {100 * used[u]:.4g}% (limit {format_limit(budget.limits[u])})" for u in used)
    return f"budget: {tight} is the tight limit; left are {left}"
