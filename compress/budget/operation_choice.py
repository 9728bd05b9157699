"""From strengths of candidates and a budget to the operations to keep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from compress.distributed import broadcast_object
from compress.errors import BudgetError
from compress.graph import weights_file_bytes
from compress.modules import Decision, Option, Strengths, decisions_of
from compress.recipe import Budget, Quantity, format_limit

from .operation_costs import CandidateCosts, Operations, OperationUnit, count_macs
from .timing import latency_ratio
from .units import UNITS

COST_LEVELS = 20000  # costs are rounded up to this many levels of the limit
LATENCY_TRIALS = 8  # networks that are timed to meet a latency budget
TIGHTER = 0.95  # factor on a limit after a network was measured above it


@dataclass(frozen=True)
class OperationChoice:
    """The candidate of each group of choices, what it leaves of the costliest network by unit, and notes."""

    chosen: dict[str, str]
    left: dict[str, float]  # empty without a budget
    notes: list[str]


@dataclass(frozen=True)
class OperationLimit:
    """A limit on the cost of operations.

    Attributes:
        costs: cost of each candidate.
        room: what the operations may cost: the limit without the cost of all that is not chosen.
        total: cost of the costliest network.
        fixed: cost of all that is not chosen.
    """

    unit: str
    costs: CandidateCosts
    room: float
    total: float
    fixed: float

    @classmethod
    def of(cls, operations: Operations, unit: OperationUnit, limit: float | Quantity) -> OperationLimit:
        """Return a limit, as a fraction of the costliest network or an absolute amount."""
        costs, largest = operations.costs(unit), operations.costliest(unit)
        total = network_cost(operations, operations.network(largest), unit)
        fixed = max(0.0, total - sum(costs[group][name] for group, name in largest.items()))
        allowed = limit.amount if isinstance(limit, Quantity) else limit * total
        return cls(unit, costs, allowed * (1 + 1e-12) - fixed, total, fixed)

    def cost(self, chosen: Mapping[str, str]) -> float:
        """Return the cost of operations."""
        return sum(self.costs[group][name] for group, name in chosen.items())


def choose_operations(operations: Operations, strengths: Strengths, budget: Budget) -> OperationChoice:
    """Return the strongest operations within the budget: the largest sum of strengths whose costs do not exceed it.

    Fractions are of the costliest network that the choices allow. `budget: auto` is no limit. A latency budget is met
    as measured: networks within the limit by the times of their operations are timed as a whole. With several limits,
    the result is the best for one of them that meets the others, or, if there is none, one that meets all.

    Raises:
        BudgetError: the budget cannot be met.
    """
    decisions = decisions_of(operations.model, strengths)
    if budget.auto:
        return OperationChoice(strongest(decisions), {}, [])
    choice: OperationChoice = broadcast_object(_choose_within(operations, decisions, budget))
    return choice


def _choose_within(operations: Operations, decisions: Sequence[Decision], budget: Budget) -> OperationChoice:
    limits = _limits(operations, budget)
    reference = operations.network(operations.costliest("latency")) if budget.is_measured else None
    measured = []
    for _ in range(LATENCY_TRIALS):
        chosen = _within_limits(decisions, limits)
        if chosen is None:
            break
        left = {limit.unit: (limit.fixed + limit.cost(chosen)) / limit.total for limit in limits}
        if reference is None:
            return OperationChoice(chosen, left, [_note(left, budget)])
        ratio = latency_ratio(*operations.time_networks([reference, operations.network(chosen)]))
        measured.append(ratio)
        time_limit = next(limit for limit in limits if limit.unit == "latency")
        if ratio.value * time_limit.total <= _allowed(budget, "latency", time_limit.total):
            left["latency"] = ratio.value
            return OperationChoice(chosen, left, [f"latency {ratio} of the costliest network", _note(left, budget)])
        room = min(TIGHTER * time_limit.room, time_limit.cost(chosen) * (1 - 1e-6))
        limits = [replace(limit, room=room) if limit is time_limit else limit for limit in limits]
    smallest = ", ".join(
        f"{limit.unit} {UNITS[limit.unit].format(limit.fixed + smallest_cost(decisions, limit.costs))}"
        f" ({(limit.fixed + smallest_cost(decisions, limit.costs)) / limit.total:.3g} of the costliest network)"
        for limit in limits
    )
    timed = f"; the smallest measured is {min(measured, key=lambda r: r.value)}" if measured else ""
    raise BudgetError(
        f"budget: {budget} cannot be reached by choosing operations; the cheapest leave {smallest}{timed}. Raise the "
        "budget, or offer cheaper candidates"
    )


def smallest_operations(operations: Operations, strengths: Strengths, budget: Budget) -> dict[str, float]:
    """Return the fraction of the costliest network that the cheapest operations leave, by unit of the budget."""
    decisions = decisions_of(operations.model, strengths)
    return {
        limit.unit: (limit.fixed + smallest_cost(decisions, limit.costs)) / limit.total
        for limit in _limits(operations, budget)
    }


def _limits(operations: Operations, budget: Budget) -> list[OperationLimit]:
    return [OperationLimit.of(operations, unit, limit) for unit, limit in budget.limits.items()]  # type: ignore[arg-type]


def _allowed(budget: Budget, unit: str, total: float) -> float:
    limit = budget.limits[unit]
    return limit.amount if isinstance(limit, Quantity) else limit * total


def _note(left: Mapping[str, float], budget: Budget) -> str:
    parts = ", ".join(
        f"{value:.1%} of the {UNITS[unit].label} (limit {format_limit(budget.limits[unit])})"
        for unit, value in left.items()
    )
    return f"the chosen operations leave {parts} of the costliest network that can be chosen"


def strongest(decisions: Sequence[Decision]) -> dict[str, str]:
    """Return the strongest option of each decision."""
    chosen: dict[str, str] = {}
    for options in decisions:
        chosen |= max(options, key=lambda option: option.strength).chosen
    return chosen


def smallest_cost(decisions: Sequence[Decision], costs: CandidateCosts) -> float:
    """Return the cost of the cheapest options."""
    return sum(min(_option_cost(option, costs) for option in options) for options in decisions)


def _within_limits(decisions: Sequence[Decision], limits: Sequence[OperationLimit]) -> dict[str, str] | None:
    """Return options within all limits; None if none were found."""
    choices = [within_limit(decisions, limit.costs, limit.room) for limit in limits]
    fitting = [c for c in choices if c is not None and all(limit.cost(c) <= limit.room for limit in limits)]
    if not fitting and len(limits) > 1:  # the sum of the largest fractions bounds the fraction of every limit
        largest = {
            group: {
                name: max(limit.costs[group][name] / limit.room if limit.room > 0 else math.inf for limit in limits)
                for name in table
            }
            for group, table in limits[0].costs.items()
        }
        together = within_limit(decisions, largest, 1.0)
        fitting = [together] if together is not None else []
    return max(fitting, key=lambda chosen: _strength(decisions, chosen), default=None)


def _strength(decisions: Sequence[Decision], chosen: Mapping[str, str]) -> float:
    return sum(
        max(o.strength for o in options if all(chosen[group] == name for group, name in o.chosen.items()))
        for options in decisions
    )


def within_limit(decisions: Sequence[Decision], costs: CandidateCosts, limit: float) -> dict[str, str] | None:
    """Return the options with the largest sum of strengths whose costs do not exceed the limit; None if there are none.

    A knapsack with one option of each decision, by dynamic programming over the cost, in steps of 1/20000 of the limit
    or exactly if the costs are few integers.
    """
    if limit < 0 or smallest_cost(decisions, costs) > limit:
        return None
    all_costs = [[_option_cost(option, costs) for option in options] for options in decisions]
    step = limit / COST_LEVELS
    if all(cost == int(cost) for row in all_costs for cost in row if math.isfinite(cost)):
        step = max(1.0, step)
    levels = math.floor(limit / step) if step else 0
    best = np.zeros(levels + 1)  # the largest strength within each cost
    taken: list[np.ndarray] = []
    for options, row in zip(decisions, all_costs, strict=True):
        values = np.full((len(options), levels + 1), -np.inf)
        for i, (option, cost) in enumerate(zip(options, row, strict=True)):
            level = _level(cost, step, levels)
            if level <= levels:
                values[i, level:] = best[: levels + 1 - level] + option.strength
        taken.append(values.argmax(0))
        best = values.max(0)
    if not np.isfinite(best[-1]):  # rounding up excluded the cheapest options
        return _cheapest(decisions, costs)
    chosen: dict[str, str] = {}
    level = levels
    for options, row, choice in zip(reversed(decisions), reversed(all_costs), reversed(taken), strict=True):
        index = int(choice[level])
        chosen |= options[index].chosen
        level -= _level(row[index], step, levels)
    return chosen


def _level(cost: float, step: float, levels: int) -> int:
    """Return a cost in steps, rounded up; one more than there are if it exceeds all."""
    if not step:
        return 0 if cost <= 0 else levels + 1
    return math.ceil(cost / step - 1e-9) if cost <= step * levels else levels + 1


def _option_cost(option: Option, costs: CandidateCosts) -> float:
    return sum(costs[group][name] for group, name in option.chosen.items())


def _cheapest(decisions: Sequence[Decision], costs: CandidateCosts) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for options in decisions:
        chosen |= min(options, key=lambda option: (_option_cost(option, costs), -option.strength)).chosen
    return chosen


def network_cost(operations: Operations, network: nn.Module, unit: OperationUnit) -> float:
    """Return the cost of a network without choices: MACs, parameters, bytes or milliseconds."""
    if unit == "params":
        return float(sum(p.numel() for p in network.parameters()))
    if unit == "size":
        return float(weights_file_bytes(network))
    if unit == "latency":
        return operations.time_networks([network])[0].median
    return float(count_macs(network, operations.example_inputs)[id(network)])
