"""Line: what a budget would keep while the search goes on, and what a dimension takes of the network's time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor, nn

from .budget import Bounds, Int, choose, smallest
from .display import Display
from .groups import Groups
from .recipe import Recipe
from .timing import Clock, choose_by_latency, shares

SCALE = 10**9  # times are counted in parts of the dense network's


@dataclass
class Line:
    """Where a round's cut is to end; `line(importance, part)` is what would be kept if a part of it were due."""

    recipe: Recipe
    groups: Groups
    model: nn.Module  # to be cut, with no scores on it
    reference: nn.Module  # the dense network
    inputs: Any
    dense: Mapping[str, int] | None  # its widths, where `model` is already cut
    round: int
    display: Display
    clock: Clock = time.perf_counter

    def __call__(self, importance: dict[str, Tensor], part: float) -> dict[str, Any]:
        recipe, groups = self.recipe, self.groups
        target = recipe.target.model_copy(update={"round_to": 1})
        due = 1 - (1 - recipe.budget.left ** (1 / recipe.steps)) * part
        if recipe.budget.unit != "latency":
            whole = int(getattr(groups.cost, recipe.budget.unit)(groups.cost.widths))
            limit = max(due, smallest(groups, recipe.budget, target, self.dense)) * whole
            return choose(groups, importance, recipe.budget, target, ranking="cost", dense=self.dense, limit=limit)
        common: dict[str, Any] = {"ranking": "global", "dense": self.dense}
        worth = {name: value / max(self.times[name], 1 / SCALE) for name, value in importance.items()}
        if part < 1:
            limit = max(due * SCALE, self._time(Bounds.of(groups, target, self.dense).least))
            return choose(groups, worth, recipe.budget, target, limit=limit, measure=self._time, **common)
        common |= {
            "clock": self.clock,
            "reference": self.reference,
            "left": recipe.budget.left ** ((self.round + 1) / recipe.steps),
        }
        with self.display.bar("timing candidates") as bar:
            return choose_by_latency(
                self.model,
                groups,
                worth,
                recipe.budget,
                target,
                recipe.timing,
                self.inputs,
                tell=lambda text, done, total: bar.to(done, text, total),
                **common,
            )[0]

    @cached_property
    def times(self) -> dict[str, float]:
        """The part of the network's time that one dimension of each group takes; measured once."""
        with self.display.bar("timing the groups") as bar:
            tell = lambda text, done, total: bar.to(done, text, total)  # noqa: E731
            return shares(self.model, self.groups, self.inputs, self.recipe.timing, tell=tell, clock=self.clock)

    def _time(self, kept: Int) -> int:
        """What the network would take with these widths, if each dimension takes what it took."""
        cost = self.groups.cost
        gone = (cost.widths - kept) @ np.array([self.times[name] for name in cost.names])
        return round(SCALE * max(0.0, 1 - float(gone)))
