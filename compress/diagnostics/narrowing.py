"""A network in which one group is narrowed and all others stay whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from compress.budget import Importance, RankedDimensions, WidthBounds
from compress.graph import Group, Groups
from compress.recipe import Target
from compress.surgery import Plan


class Narrowing:
    """Plans that cut a single group to its most important dimensions, within the widths that a run may choose."""

    def __init__(self, model: nn.Module, groups: Groups, importance: Importance, target: Target) -> None:
        self.model, self.groups = model, groups
        self.bounds = WidthBounds.of(groups, target)
        self._ranked = RankedDimensions.of(groups, importance, self.bounds, "global", "macs")
        self._index = {name: i for i, name in enumerate(groups.cost.names)}

    def widths(self, group: Group, fractions: Sequence[float]) -> list[int]:
        """Return the allowed widths next to these fractions, from wide to narrow, each once.

        The full width is among them only if it was asked for: fractions that no narrower width comes close to are left
        out.
        """
        i = self._index[group.name]
        step, least = int(self.bounds.multiple[i]), int(self.bounds.least_if_kept[i])
        widths = set()
        for fraction in fractions:
            width = max(least, round(fraction * group.width / step) * step)
            if width < group.width or fraction == 1:
                widths.add(min(width, group.width))
        return sorted(widths, reverse=True)

    def plan(self, group: Group, width: int) -> Plan:
        """Return the plan that keeps the `width` most important dimensions of a group, and all of the others."""
        keep = self._ranked.keep(self._widths(group, width))
        return Plan.build(self.model, self.groups, {group.name: keep[group.name]})

    def macs_left(self, group: Group, width: int) -> float:
        """Return the fraction of the network's MACs that is left at this width of the group."""
        cost = self.groups.cost
        return float(cost.macs(self._widths(group, width))) / max(1.0, float(cost.macs(cost.widths)))

    def _widths(self, group: Group, width: int) -> np.ndarray:
        widths = self.groups.cost.widths.copy()
        widths[self._index[group.name]] = width
        return widths


@contextmanager
def zeroed(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Zero what a plan drops for the time of the block: the model computes what the sliced one would."""
    tensors = plan.check(model)
    saved = {name: tensors[name].detach().clone() for name in plan.gated_dims}
    try:
        plan.zero_(model)
        yield
    finally:
        with torch.no_grad():
            for name, value in saved.items():
                tensors[name].copy_(value)
