"""Budget and search length of one round of a pruning in several rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compress.budget import remaining_fractions
from compress.graph import Groups
from compress.recipe import Recipe
from compress.surgery import Plan


@dataclass(frozen=True)
class Round:
    """One round of search and cut. Each round leaves the same fraction of what the round before left."""

    recipe: Recipe
    index: int
    plan: Plan  # of the rounds before
    dense_costs: Mapping[str, float]  # by the units of the budget; latency in milliseconds, if its limit is absolute

    def search_steps(self, total: int) -> int:
        """Return this round's share of all search steps."""
        share, remainder = divmod(total, self.recipe.steps)
        return max(1, share + (self.index < remainder)) if total else 0

    @property
    def remaining_fractions(self) -> dict[str, float]:
        """Fraction of the dense network that this round may leave, by the units of the budget."""
        fractions = remaining_fractions(self.recipe.budget, self.dense_costs)
        return {unit: fraction ** ((self.index + 1) / self.recipe.steps) for unit, fraction in fractions.items()}

    def limits(self, groups: Groups) -> dict[str, float]:
        """Return the costs that this round may leave, by the units of the budget; latency as a fraction."""
        limits = {
            unit: fraction if unit == "latency" else fraction * self.dense_costs[unit]
            for unit, fraction in self.remaining_fractions.items()
        }
        if "dims" in limits and self.index:
            limits["dims"] -= self._unoffered_dimensions(groups)
        return limits

    def _unoffered_dimensions(self, groups: Groups) -> int:
        """Return the dimensions of groups that only earlier rounds offered; a budget of dimensions counts them too."""
        return sum(map(len, self.plan.keep.values())) - int(groups.cost.widths.sum())
