"""Choice of the dimensions to keep under a latency budget, by timing candidate networks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import nn

from compress.errors import BudgetError
from compress.formatting import format_percent
from compress.graph import Groups
from compress.modules import shared_copy
from compress.recipe import Budget, Quantity, Ranking, Target
from compress.surgery import Plan, slice_

from .bounds import WidthBounds
from .choose import check_reachable, count_within, fill_up
from .importance import Importance, Int
from .limits import CostLimits, computed_limits
from .ranking import RankedDimensions
from .timing import DoesNotRun, LatencyMeasurement, LatencyRatio

MAX_BISECTIONS = 8  # of the ranking: the number of dimensions is then known to 1/256 of all


class CandidateDoesNotRun(DoesNotRun):
    """Raised when a network that is cut by `plan` to be timed does not run."""

    def __init__(self, message: str, plan: Plan) -> None:
        super().__init__(message)
        self.plan = plan


def choose_by_latency(
    model: nn.Module,
    groups: Groups,
    importance: Importance,
    budget: Budget,
    target: Target,
    measurement: LatencyMeasurement,
    *,
    ranking: Ranking = "global",
    dense_widths: Mapping[str, int] | None = None,
    limits: Mapping[str, float] | None = None,
) -> tuple[dict[str, Int], list[str]]:
    """Return the most important dimensions that run within a latency budget as measured, and notes for the report.

    The number of dimensions is found by bisection on the ranking. Each candidate is sliced and timed in turn with the
    dense network until it is clear on which side of the budget it lies, with at most `4 * timing.repeats` pairs of
    runs. The widest candidate that meets the budget is measured again; if it fails, so are narrower ones. Dimensions
    of zero importance are not kept, even if the budget has room for them. If the budget limits other costs as well,
    only candidates within these limits are timed.

    Args:
        measurement: how to measure; if `model` is already pruned, `measurement.reference` is the dense network.
        dense_widths: the dense network's widths by group, which bounds refer to, if `model` is already pruned.
        limits: the fraction of the dense network's time to stay within, as `latency`, and the costs by their units; by
            default the budget's, with `model` as the dense network.

    Raises:
        BudgetError: the budget cannot be reached, or the noise is too large to tell.
        ValueError: the budget is not a latency; or importance or `target.bounds` are invalid, as in `choose_widths`.
        TypeError: the example inputs have none of the forms that a model can be called with.
    """
    if not budget.is_measured:
        raise ValueError(f"choose_by_latency: expected a latency budget; got {budget}")
    cost_limits = computed_limits(groups, budget, limits) if budget.computed_units else CostLimits(())
    check_reachable(groups, cost_limits, budget, target, dense_widths, limits)
    limit = latency_fraction(model, budget, measurement) if limits is None else limits["latency"]
    bounds = WidthBounds.of(groups, target, dense_widths)
    bounds = replace(bounds, most=bounds.nonzero_widths(groups, importance))
    ranked = RankedDimensions.of(groups, importance, bounds, ranking, "latency")
    most = count_within(ranked, cost_limits)
    if limit >= 1:
        return ranked.keep(fill_up(ranked.widths(most), ranked, cost_limits)), []
    reference = model if measurement.reference is None else measurement.reference
    widest_is_dense = reference is model and bool((ranked.widths(most) == groups.cost.widths).all())
    trial = LatencyTrial(model, shared_copy(reference), groups, ranked, most, measurement, limit, widest_is_dense)
    trial.check_noise()
    count = trial.find_widest()
    if cost_limits.limits and count == most:  # the other limits are the tight ones
        filled = fill_up(ranked.widths(most), ranked, cost_limits)
        if (ratio := trial.measure(filled, measurement.timing.repeats)).value <= limit:
            return ranked.keep(filled), [f"latency {ratio}"]
    widths, ratio = trial.confirm(count)
    within_noise = f": the budget of {format_percent(limit)} lies within the noise" if ratio.high > limit else ""
    notes = [f"latency {ratio}{within_noise}"] if within_noise or cost_limits.limits else []
    return ranked.keep(widths), notes


def latency_fraction(model: nn.Module, budget: Budget, measurement: LatencyMeasurement) -> float:
    """Return the latency limit as a fraction of the dense network's time, which is measured for an absolute limit."""
    limit = budget.latency
    assert limit is not None
    return min(1.0, limit.amount / measurement.milliseconds(model)) if isinstance(limit, Quantity) else limit


def check_latency_reachable(
    model: nn.Module, groups: Groups, target: Target, measurement: LatencyMeasurement, limit: float
) -> None:
    """Time the narrowest network that the target allows, against a limit as a fraction of the dense network's time.

    Raises:
        BudgetError: the latency budget cannot be reached, or the noise is too large to tell.
    """
    if limit >= 1 or not len(groups):
        return
    equal = {g.name: np.ones(g.width) for g in groups}
    ranked = RankedDimensions.of(groups, equal, WidthBounds.of(groups, target), "global", "latency")
    dense = shared_copy(model)
    trial = LatencyTrial(model, dense, groups, ranked, ranked.count, measurement, limit, widest_is_dense=True)
    trial.check_noise()
    if not trial.meets_limit(0):
        raise BudgetError(trial.out_of_reach_message(*trial.measured.values()))


def measure_dimension_times(model: nn.Module, groups: Groups, measurement: LatencyMeasurement) -> dict[str, float]:
    """Return the fraction of the network's time that one dimension of each group takes, as measured.

    Each group is halved and timed in turn with the dense network until it is clear that the halved network is faster,
    with at most `4 * timing.repeats` pairs of runs. The time saved is divided by the number of dimensions removed.
    If the result is not clear, the fraction of MACs is used instead.
    """
    times, cost = {}, groups.cost
    keep_all = {g.name: np.arange(g.width) for g in groups}
    for done, group in enumerate(groups, 1):
        kept_per_head = max(1, group.width // group.num_heads // 2)
        kept = group.num_heads * kept_per_head
        widths = np.where(np.array(cost.names) == group.name, kept, cost.widths)
        saved = 1 - int(cost.macs(widths)) / max(1, int(cost.macs(cost.widths)))
        if kept < group.width:
            keep = keep_all | {group.name: group.indices_per_head(kept_per_head)}
            halved = slice_(shared_copy(model), Plan.build(model, groups, keep))
            ratio = measurement.compare(shared_copy(model), halved, lambda r: r.high < 1)
            saved = 1 - ratio.value if ratio.high < 1 else saved
        times[group.name] = saved / max(1, group.width - kept)
        measurement.report_progress(f"timing {group.name}", done, len(groups))
    return times


@dataclass
class LatencyTrial:
    """Candidates that keep the best dimensions of a ranking, each timed in turn with the dense network."""

    model: nn.Module
    dense: nn.Module  # a shared copy, which is run
    groups: Groups
    ranked: RankedDimensions
    most: int  # dimensions of the widest candidate
    measurement: LatencyMeasurement
    limit: float  # fraction of the dense network's time
    widest_is_dense: bool  # whether the widest candidate is the dense network itself
    measured: dict[tuple[int, ...], LatencyRatio] = field(default_factory=dict)  # by widths
    done: int = 0

    def check_noise(self) -> None:
        """Time the dense network against itself.

        Raises:
            BudgetError: the budget lies within the noise.
        """
        allowed = 1 - self.limit
        noise = self.measurement.compare(self.dense, shared_copy(self.dense), lambda r: r.high - r.low <= allowed)
        self._report_progress(f"the dense network against itself: {noise}")
        if noise.high - noise.low > allowed:
            raise BudgetError(
                f"budget.latency: {format_percent(self.limit)} cannot be distinguished from 100% on this machine: the "
                f"dense network timed against itself gives {noise.interval} ({noise.pairs} repeats). "
                "Raise timing.repeats or timing.batch_size, stop other programs, or lower the budget."
            )

    def find_widest(self) -> int:
        """Return the largest number of dimensions that was measured within the limit.

        Raises:
            BudgetError: not even the narrowest network is within the limit.
        """
        low, high = 0, self.most
        if not self.meets_limit(low):
            raise BudgetError(self.out_of_reach_message(*self.measured.values()))
        if not self.widest_is_dense and self.meets_limit(high):
            return high
        high, most = high - 1, len(self.measured) + MAX_BISECTIONS
        while low < high and len(self.measured) < most:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.meets_limit(middle) else (low, middle - 1)
        return low

    def confirm(self, count: int) -> tuple[Int, LatencyRatio]:
        """Measure the widths of the `count` best dimensions again; if they fail, fewer, by growing steps.

        Raises:
            BudgetError: none is within the limit when measured again.
        """
        measured_again: dict[tuple[int, ...], LatencyRatio] = {}
        for step in range(self.ranked.count.bit_length() + 1):
            widths = self.ranked.widths(count)
            if tuple(widths) not in measured_again:
                ratio = measured_again[tuple(widths)] = self.measure(widths, self.measurement.timing.repeats)
                self._report_progress(f"latency {ratio} when measured again", last=ratio.value <= self.limit)
                if ratio.value <= self.limit:
                    return widths, ratio
            count = max(0, count - (max(1, self.ranked.count >> MAX_BISECTIONS) << step))
        raise BudgetError(self.out_of_reach_message(*measured_again.values()))

    def meets_limit(self, count: int) -> bool:
        """Return whether the network with the `count` best dimensions runs within the limit; measured once."""
        widths = self.ranked.widths(count)
        key = tuple(widths)
        if key not in self.measured:
            self.measured[key] = self.measure(widths)
            dimensions = f"{sum(key)} of {sum(self.groups.cost.widths)} dimensions"
            self._report_progress(f"latency {self.measured[key]} with {dimensions}")
        return self.measured[key].value <= self.limit

    def out_of_reach_message(self, *measured: LatencyRatio) -> str:
        best = min(measured, key=lambda ratio: ratio.value)
        return (
            f"budget.latency: {format_percent(self.limit)} of the dense network's time cannot be reached; the smallest "
            f"measured is {best}, {len(self.groups)} groups offered, {len(self.groups.refused)} refused. "
            f"{self.groups.describe_refusals()}Raise the budget, allow more in target, or lower its min_keep, "
            "round_to, bounds."
        )

    def measure(self, widths: Int, min_pairs: int = 0) -> LatencyRatio:
        """Slice a candidate to these widths and time it until it is clear on which side of the limit it lies."""
        plan = Plan.build(self.model, self.groups, self.ranked.keep(widths))
        candidate = slice_(shared_copy(self.model), plan)
        try:
            return self.measurement.compare(
                self.dense, candidate, lambda r: not r.low <= self.limit <= r.high, min_pairs
            )
        except DoesNotRun as error:
            raise CandidateDoesNotRun(str(error), plan) from error

    def _report_progress(self, text: str, *, last: bool = False) -> None:
        bisections = min(MAX_BISECTIONS, math.ceil(math.log2(self.most + 1)))
        total = 3 + (not self.widest_is_dense) + bisections  # if the first candidate is confirmed
        self.done = total if last else min(self.done + 1, total - 1)
        self.measurement.report_progress(text, self.done, total)
