"""Line: what a budget would keep while the search goes on, and what a dimension takes of the network's time."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .budget import Bounds, Int, choose, smallest
from .display import Display
from .groups import Groups
from .recipe import Recipe, Target
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
    limit: float | None = None  # what this round may leave, if not the budget's part of `model`
    clock: Clock = time.perf_counter

    def __post_init__(self) -> None:
        timed = self.recipe.budget.unit == "latency"
        self.measured = torch.full((len(self.groups),), math.nan, dtype=torch.float64) if timed else None

    def __call__(self, importance: dict[str, Tensor], part: float) -> dict[str, Any]:
        recipe, groups, target = self.recipe, self.groups, self.recipe.target
        if part < 1 or self.round + 1 < recipe.steps:  # rounded once, at the end
            target = target.model_copy(update={"round_to": 1})
        if recipe.budget.unit == "latency":
            return self._timed(importance, part, target)
        whole = int(getattr(groups.cost, recipe.budget.unit)(groups.cost.widths))
        end = recipe.budget.left * whole if self.limit is None else self.limit
        least = smallest(groups, recipe.budget, target, self.dense) * whole
        limit = max(whole - (whole - end) * part, least)
        return choose(groups, importance, recipe.budget, target, ranking="cost", dense=self.dense, limit=limit)

    def _timed(self, importance: dict[str, Tensor], part: float, target: Target) -> dict[str, Any]:
        """By measured shares of the time on the way, and by timing candidates at the end."""
        recipe, groups = self.recipe, self.groups
        common: dict[str, Any] = {"ranking": "global", "dense": self.dense}
        times = self.times()
        worth = {name: value / max(times[name], 1 / SCALE) for name, value in importance.items()}
        if part < 1:
            due = 1 - (1 - recipe.budget.left ** (1 / recipe.steps)) * part
            limit = max(due * SCALE, self._time(Bounds.of(groups, target, self.dense).least))
            return choose(groups, worth, recipe.budget, target, limit=limit, measure=self._time, **common)
        common |= {"clock": self.clock, "reference": self.reference}
        common["left"] = recipe.budget.left ** ((self.round + 1) / recipe.steps)
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

    def times(self) -> dict[str, float]:
        """The part of the network's time that one dimension of each group takes; measured once."""
        names, known = self.groups.cost.names, self.measured
        if known is None or bool(known.isnan().any()):
            with self.display.bar("timing the groups") as bar:
                tell = lambda text, done, total: bar.to(done, text, total)  # noqa: E731
                found = shares(self.model, self.groups, self.inputs, self.recipe.timing, tell=tell, clock=self.clock)
            if known is None:
                return found
            known.copy_(torch.tensor([found[name] for name in names], dtype=torch.float64))
        return dict(zip(names, known.tolist(), strict=True))

    def _time(self, kept: Int) -> int:
        """What the network would take with these widths, if each dimension takes what it took."""
        cost = self.groups.cost
        gone = (cost.widths - kept) @ np.array(list(self.times().values()))
        return round(SCALE * max(0.0, 1 - float(gone)))
