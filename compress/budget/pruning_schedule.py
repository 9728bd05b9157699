"""Pruning schedule of a search: the dimensions that the budget would keep at each point of the way to it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from compress.graph import Groups
from compress.progress import ProgressBar, ProgressDisplay
from compress.recipe import Ranking, Recipe, Target

from .bounds import WidthBounds
from .choose import choose_widths, smallest_fractions
from .importance import Int
from .latency import choose_by_latency, measure_dimension_times
from .limits import dense_costs
from .timing import Clock, LatencyMeasurement

TIME_SCALE = 10**9  # estimated times are integers, in billionths of the dense network's time


@dataclass
class PruningSchedule:
    """Callable: `schedule(importance, progress)` returns the dimensions to keep on the way to this round's budget.

    Attributes:
        model: the network to prune, without gates.
        reference: the dense network.
        dense_widths: the dense network's widths, if `model` is already pruned.
        limits: unit -> cost that this round may leave; latency as a fraction of the dense network's.
    """

    recipe: Recipe
    groups: Groups
    model: nn.Module
    reference: nn.Module
    example_inputs: object
    dense_widths: Mapping[str, int] | None
    round_index: int
    display: ProgressDisplay
    limits: Mapping[str, float] = field(kw_only=True)
    clock: Clock = time.perf_counter

    def __post_init__(self) -> None:
        measured = self.recipe.budget.is_measured
        # Saved with the search, so that a resumed search continues with the same times.
        self.measured_times = torch.full((len(self.groups),), math.nan, dtype=torch.float64) if measured else None

    def __call__(self, importance: dict[str, Tensor], progress: float, ranking: Ranking = "cost") -> dict[str, Int]:
        """Return the dimensions to keep when a fraction `progress` (0 to 1) of this round's pruning is due.

        Args:
            ranking: how importance is compared across groups; with a latency budget, `cost` is per measured time.
        """
        recipe, groups, target = self.recipe, self.groups, self.recipe.target
        if progress < 1:  # widths are rounded once, at the end of the round
            target = target.model_copy(update={"round_to": 1})
        if recipe.budget.is_measured:
            return self._keep_by_latency(importance, progress, target, ranking)
        return choose_widths(
            groups,
            importance,
            recipe.budget,
            target,
            ranking=ranking,
            dense_widths=self.dense_widths,
            limits=self._limits_on_the_way(progress, target),
        )

    def _limits_on_the_way(self, progress: float, target: Target) -> dict[str, float]:
        """Return the computed limits when a fraction of this round's pruning is due; always reachable."""
        current = dense_costs(self.groups, self.recipe.budget)
        smallest = smallest_fractions(self.groups, self.recipe.budget, target, self.dense_widths)
        return {
            unit: max(start - (start - self.limits[unit]) * progress, smallest[unit] * start)
            for unit, start in current.items()
        }

    def _keep_by_latency(
        self, importance: dict[str, Tensor], progress: float, target: Target, ranking: Ranking
    ) -> dict[str, Int]:
        """Estimate the time of widths by the time per dimension on the way; measure candidates at the end."""
        recipe, groups = self.recipe, self.groups
        if ranking == "cost":
            times, ranking = self.dimension_times(), "global"
            importance = {name: value / max(times[name], 1 / TIME_SCALE) for name, value in importance.items()}
        if progress < 1:
            of_this_round = self.limits["latency"] ** (
                1 / (self.round_index + 1)
            )  # every round leaves the same fraction
            fraction = 1 - (1 - of_this_round) * progress
            smallest = self._estimated_time(WidthBounds.of(groups, target, self.dense_widths).least)
            on_the_way = self._limits_on_the_way(progress, target)
            return choose_widths(
                groups,
                importance,
                recipe.budget,
                target,
                ranking=ranking,
                dense_widths=self.dense_widths,
                limits=on_the_way | {"latency": max(fraction * TIME_SCALE, smallest)},
                estimated_latency=self._estimated_time,
            )
        with self.display.bar("timing candidates") as bar:
            keep, _ = choose_by_latency(
                self.model,
                groups,
                importance,
                recipe.budget,
                target,
                self._measurement(bar),
                ranking=ranking,
                dense_widths=self.dense_widths,
                limits=self.limits,
            )
        return keep

    def dimension_times(self) -> dict[str, float]:
        """Return the fraction of the network's time that one dimension of each group takes; measured once."""
        names, known = self.groups.cost.names, self.measured_times
        if known is None or bool(known.isnan().any()):
            with self.display.bar("timing the groups") as bar:
                times = measure_dimension_times(self.model, self.groups, self._measurement(bar))
            if known is None:
                return times
            known.copy_(torch.tensor([times[name] for name in names], dtype=torch.float64))
        return dict(zip(names, known.tolist(), strict=True))

    def _measurement(self, bar: ProgressBar) -> LatencyMeasurement:
        return LatencyMeasurement(
            self.example_inputs,
            self.recipe.timing,
            self.reference,
            self.clock,
            on_progress=lambda text, done, total: bar.update(done, text, total),
        )

    def _estimated_time(self, widths: Int) -> int:
        """Return the estimated time at these widths: every dimension removed saves its measured time."""
        removed = self.groups.cost.widths - widths
        saved = removed @ np.array(list(self.dimension_times().values()))
        return round(TIME_SCALE * max(0.0, 1 - float(saved)))
