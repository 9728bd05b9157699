"""Choice of the dimensions to keep, from importance and a computed or learned budget."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compress.errors import BudgetError
from compress.formatting import format_percent
from compress.graph import Groups
from compress.recipe import Budget, Quantity, Ranking, Target

from .bounds import WidthBounds
from .importance import Importance, Int
from .limits import CostLimit, CostLimits, computed_limits
from .ranking import RankedDimensions
from .units import UNITS, CostOfWidths


def smallest_fractions(
    groups: Groups, budget: Budget, target: Target, dense_widths: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Return the fraction of each computed cost of a budget that is left when every group has its least width.

    All costs are smallest at the same widths, so limits do not contradict each other: each is reachable or is not.
    For `budget: auto` the cost is MACs.

    Raises:
        ValueError: `target.bounds` are invalid.
    """
    least = WidthBounds.of(groups, target, dense_widths).least
    fractions = {}
    for unit in ("macs",) if budget.auto else budget.computed_units:
        cost_of = UNITS[unit].cost_of_widths(groups)
        dense_cost = int(cost_of(groups.cost.widths))
        fractions[unit] = int(cost_of(least)) / dense_cost if dense_cost else 1.0
    return fractions


def choose_widths(
    groups: Groups,
    importance: Importance,
    budget: Budget,
    target: Target,
    *,
    ranking: Ranking = "global",
    dense_widths: Mapping[str, int] | None = None,
    limits: Mapping[str, float] | None = None,
    estimated_latency: CostOfWidths | None = None,
) -> dict[str, Int]:
    """Return the dimensions to keep of each group: the most important ones within the budget.

    No cost exceeds its limit, and no group could keep one step more (`round_to` dimensions, or a head) without
    exceeding a limit or its bounds. The widths are found by bisection on the ranking; what is left of the budget is
    then given to the groups in the order of their next best dimension. With `budget: auto` every dimension of nonzero
    importance is kept.

    Args:
        dense_widths: the dense network's widths by group, which bounds refer to, if the network is already pruned.
        limits: unit -> cost to stay within; by default the budget's on this network.
        estimated_latency: the latency of widths, for a budget that limits it.

    Raises:
        BudgetError: a limit cannot be reached; the message names the smallest reachable of each.
        ValueError: importance is missing, has the wrong shape or contains NaN; `target.bounds` are invalid; or the
            budget is a latency without an estimate, for which there is `choose_by_latency`.
    """
    bounds = WidthBounds.of(groups, target, dense_widths)
    if budget.auto:
        ranked = RankedDimensions.of(groups, importance, bounds, ranking, budget.unit)
        return ranked.keep(bounds.nonzero_widths(groups, importance))
    cost_limits = computed_limits(groups, budget, limits, estimated_latency)
    ranked = RankedDimensions.of(groups, importance, bounds, ranking, cost_limits.ranking_unit)
    check_reachable(groups, cost_limits, budget, target, dense_widths, limits)
    count = count_within(ranked, cost_limits)
    return ranked.keep(fill_up(ranked.widths(count), ranked, cost_limits))


def check_reachable(
    groups: Groups,
    cost_limits: CostLimits,
    budget: Budget,
    target: Target,
    dense_widths: Mapping[str, int] | None = None,
    limits: Mapping[str, float] | None = None,
) -> None:
    """Check that the least widths are within every limit.

    Raises:
        BudgetError: a limit cannot be reached; the message names the smallest reachable of each.
    """
    if not cost_limits.fit(WidthBounds.of(groups, target, dense_widths).least):
        raise BudgetError(_out_of_reach_message(groups, cost_limits, budget, target, dense_widths, limits))


def count_within(ranked: RankedDimensions, limits: CostLimits) -> int:
    """Return how many of the best dimensions can be kept within every limit, by bisection."""
    low, high = 0, ranked.count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if limits.fit(ranked.widths(middle)) else (low, middle - 1)
    return low


def fill_up(widths: Int, ranked: RankedDimensions, limits: CostLimits) -> Int:
    """Widen groups one after the other, best next dimension first, as far as the limits permit."""
    bounds = ranked.bounds
    ranks = np.argsort(ranked.owners, kind="stable")  # rank of each dimension, group after group
    starts = np.concatenate([[0], np.cumsum(bounds.most)])
    can_grow = [g for g in range(len(widths)) if 0 < widths[g] < bounds.most[g]]  # removed branches stay removed
    for g in sorted(can_grow, key=lambda g: int(ranks[starts[g] + widths[g]])):
        low, high = 0, int(-(-(bounds.most[g] - widths[g]) // bounds.multiple[g]))
        while low < high:
            middle = (low + high + 1) // 2
            fits = limits.fit(_widened(widths, g, middle, bounds))
            low, high = (middle, high) if fits else (low, middle - 1)
        widths = _widened(widths, g, low, bounds)
    return widths


def _widened(widths: Int, g: int, steps: int, bounds: WidthBounds) -> Int:
    wider = widths.copy()
    if steps:
        wider[g] = min((widths[g] // bounds.multiple[g] + steps) * bounds.multiple[g], bounds.most[g])
    return wider


def _out_of_reach_message(
    groups: Groups,
    cost_limits: CostLimits,
    budget: Budget,
    target: Target,
    dense_widths: Mapping[str, int] | None,
    limits: Mapping[str, float] | None,
) -> str:
    def smallest(limit: CostLimit, target: Target) -> str:
        cost = int(limit.cost_of(WidthBounds.of(groups, target, dense_widths).least))
        return _describe_cost(limit, cost, budget, limits)

    least = WidthBounds.of(groups, target, dense_widths).least
    missed = [limit for limit in cost_limits.limits if int(limit.cost_of(least)) > limit.allowed]
    worst = max(missed, key=lambda limit: limit.used(least))
    relaxed = {
        key: smallest(worst, target.model_copy(update={key: value})) for key, value in (("bounds", {}), ("round_to", 1))
    }
    relaxed = {f"target.{key}": cost for key, cost in relaxed.items() if cost != smallest(worst, target)}
    what = "it" if len(cost_limits.limits) == 1 else worst.unit
    without = "".join(f"Without {key} {what} would be {cost}. " for key, cost in relaxed.items())
    loosen = " or ".join(relaxed) or "target.min_keep"
    offered = f"({len(groups)} groups offered, {len(groups.refused)} refused)"
    if len(cost_limits.limits) == 1:
        expected = _describe_limit(worst, budget, limits)
        problem = f"budget.{worst.unit}: {expected} cannot be reached; the smallest that can is "
        problem += f"{smallest(worst, target)} {offered}. "
    else:
        expected = " and ".join(f"{limit.unit} {_describe_limit(limit, budget, limits)}" for limit in missed)
        each = ", ".join(f"{limit.unit} {smallest(limit, target)}" for limit in cost_limits.limits)
        problem = f"budget: {expected} cannot be reached; the smallest that can: {each} {offered}. "
    problem += f"{groups.describe_refusals()}{without}"
    return problem + (
        f"Raise the budget, allow more in target, or lower {loosen}." if len(groups) else "Allow more in target."
    )


def _describe_limit(limit: CostLimit, budget: Budget, limits: Mapping[str, float] | None) -> str:
    """Describe what was asked for: a fraction of the dense network, or an amount."""
    asked = budget.limits[limit.unit]
    if limits is not None:  # of a round
        return UNITS[limit.unit].format(limit.allowed)
    if isinstance(asked, Quantity):
        return f"{asked} (the dense network has {UNITS[limit.unit].format(limit.current)})"
    return f"{format_percent(asked)} of the dense network"


def _describe_cost(limit: CostLimit, cost: int, budget: Budget, limits: Mapping[str, float] | None) -> str:
    """Describe a cost in the way that the limit was given."""
    if limits is not None or isinstance(budget.limits[limit.unit], Quantity):
        return UNITS[limit.unit].format(cost)
    return format_percent(cost / max(1, limit.current))
