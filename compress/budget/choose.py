"""Choice of the dimensions to keep, from importance and a computed or learned budget."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from compress.errors import BudgetError
from compress.formatting import format_percent
from compress.graph import Groups
from compress.recipe import Budget, Ranking, Target

from .bounds import WidthBounds
from .importance import Importance, Int
from .ranking import RankedDimensions
from .units import UNITS, CostOfWidths


def smallest_fraction(
    groups: Groups, budget: Budget, target: Target, dense_widths: Mapping[str, int] | None = None
) -> float:
    """Return the fraction of the cost that is left when every group has its least width.

    Raises:
        ValueError: the budget is a latency, or `target.bounds` are invalid.
    """
    cost_of = UNITS["macs" if budget.auto else budget.unit].cost_of_widths(groups)
    dense_cost = int(cost_of(groups.cost.widths))
    return int(cost_of(WidthBounds.of(groups, target, dense_widths).least)) / dense_cost if dense_cost else 1.0


def choose_widths(
    groups: Groups,
    importance: Importance,
    budget: Budget,
    target: Target,
    *,
    ranking: Ranking = "global",
    dense_widths: Mapping[str, int] | None = None,
    limit: float | None = None,
    cost_of: CostOfWidths | None = None,
) -> dict[str, Int]:
    """Return the dimensions to keep of each group: the most important ones within the budget.

    The cost never exceeds the budget, and no group could keep one step more (`round_to` dimensions, or a head) without
    exceeding the budget or its bounds. The widths are found by bisection on the ranking; what is left of the budget is
    then given to the groups in the order of their next best dimension. With `budget: auto` every dimension of nonzero
    importance is kept.

    Args:
        dense_widths: the dense network's widths by group, which bounds refer to, if the network is already pruned.
        limit: the cost to stay within, in the budget's unit; by default the budget's fraction of this network's cost.
        cost_of: the cost of widths; by default that of the budget's unit.

    Raises:
        BudgetError: the budget cannot be reached; the message names the smallest that can.
        ValueError: importance is missing, has the wrong shape or contains NaN; `target.bounds` are invalid; or the
            budget is a latency, for which there is `choose_by_latency`.
    """
    bounds = WidthBounds.of(groups, target, dense_widths)
    ranked = RankedDimensions.of(groups, importance, bounds, ranking, budget.unit)
    if budget.auto:
        return ranked.keep(bounds.nonzero_widths(groups, importance))
    cost_of = cost_of or UNITS[budget.unit].cost_of_widths(groups)
    allowed = budget.left * int(cost_of(groups.cost.widths)) if limit is None else limit
    allowed_cost = math.floor(allowed * (1 + 1e-12))  # in floating point 0.29 * 100 is slightly below 29
    if int(cost_of(bounds.least)) > allowed_cost:
        raise BudgetError(_out_of_reach_message(groups, budget, target, dense_widths, limit))
    low, high = 0, ranked.count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int(cost_of(ranked.widths(middle))) <= allowed_cost else (low, middle - 1)
    return ranked.keep(_fill_up(ranked.widths(low), ranked, cost_of, allowed_cost))


def _fill_up(widths: Int, ranked: RankedDimensions, cost_of: CostOfWidths, allowed_cost: int) -> Int:
    """Widen groups one after the other, best next dimension first, as far as the allowed cost permits."""
    bounds = ranked.bounds
    ranks = np.argsort(ranked.owners, kind="stable")  # rank of each dimension, group after group
    starts = np.concatenate([[0], np.cumsum(bounds.most)])
    can_grow = [g for g in range(len(widths)) if 0 < widths[g] < bounds.most[g]]  # removed branches stay removed
    for g in sorted(can_grow, key=lambda g: int(ranks[starts[g] + widths[g]])):
        low, high = 0, int(-(-(bounds.most[g] - widths[g]) // bounds.multiple[g]))
        while low < high:
            middle = (low + high + 1) // 2
            fits = int(cost_of(_widened(widths, g, middle, bounds))) <= allowed_cost
            low, high = (middle, high) if fits else (low, middle - 1)
        widths = _widened(widths, g, low, bounds)
    return widths


def _widened(widths: Int, g: int, steps: int, bounds: WidthBounds) -> Int:
    wider = widths.copy()
    wider[g] = min(widths[g] + steps * bounds.multiple[g], bounds.most[g])
    return wider


def _out_of_reach_message(
    groups: Groups, budget: Budget, target: Target, dense_widths: Mapping[str, int] | None, limit: float | None
) -> str:
    cost_of = UNITS[budget.unit].cost_of_widths(groups)
    dense_cost = int(cost_of(groups.cost.widths))

    def smallest(target: Target) -> str:
        cost = int(cost_of(WidthBounds.of(groups, target, dense_widths).least))
        return format_percent(cost / dense_cost) if limit is None else str(cost)

    bounded = smallest(target)
    relaxed = {
        key: smallest(target.model_copy(update={key: value})) for key, value in (("bounds", {}), ("round_to", 1))
    }
    relaxed = {f"target.{key}": cost for key, cost in relaxed.items() if cost != bounded}
    without = "".join(f"Without {key} it would be {cost}. " for key, cost in relaxed.items())
    loosen = " or ".join(relaxed) or "target.min_keep"
    expected = f"{format_percent(budget.left)} of the dense network" if limit is None else f"{limit:.0f}"
    return (
        f"budget.{budget.unit}: {expected} cannot be reached; the smallest that can is {bounded} "
        f"({len(groups)} groups offered, {len(groups.refused)} refused). {groups.describe_refusals()}{without}"
        + (f"Raise the budget, allow more in target, or lower {loosen}." if len(groups) else "Allow more in target.")
    )
