"""Budget and search length of one round of a pruning in several rounds."""

from __future__ import annotations

from dataclasses import dataclass

from compress.budget import UNITS
from compress.graph import Groups
from compress.recipe import Recipe
from compress.surgery import Plan


@dataclass(frozen=True)
class Round:
    """One round of search and cut. Each round leaves the same fraction of what the round before left."""

    recipe: Recipe
    index: int
    plan: Plan  # of the rounds before
    dense_cost: int | None  # in the budget's unit; None in the first round

    @property
    def remaining_fraction(self) -> float:
        """Fraction of the dense network that this round may leave."""
        fraction: float = self.recipe.budget.left ** ((self.index + 1) / self.recipe.steps)
        return fraction

    def search_steps(self, total: int) -> int:
        """Return this round's share of all search steps."""
        share, remainder = divmod(total, self.recipe.steps)
        return max(1, share + (self.index < remainder)) if total else 0

    def cost_limit(self, groups: Groups) -> float | None:
        """Return the cost that this round may leave, in the budget's unit; None if the budget itself is the limit."""
        if self.index == 0:
            return None if self.recipe.steps == 1 else self.remaining_fraction * current_cost(self.recipe, groups)
        assert self.dense_cost is not None
        return self.remaining_fraction * float(self.dense_cost) - self._unoffered_dimensions(groups)

    def _unoffered_dimensions(self, groups: Groups) -> int:
        """Return the dimensions of groups that only earlier rounds offered; a budget of dimensions counts them too."""
        if self.recipe.budget.unit != "dims":
            return 0
        return sum(map(len, self.plan.keep.values())) - int(groups.cost.widths.sum())


def current_cost(recipe: Recipe, groups: Groups) -> int:
    """Return the cost of the network as it is, in the budget's unit.

    Raises:
        ValueError: the budget is measured or learned, not computed.
    """
    return int(UNITS[recipe.budget.unit].cost_of_widths(groups)(groups.cost.widths))
