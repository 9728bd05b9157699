"""Budget units: one entry in a table for each, with the cost of widths in that unit.

A new computed unit needs an entry in `UNITS`, and its name in `BudgetUnit` and as a field of `Budget`, both in
recipe/budget_section.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compress.formatting import round_up
from compress.graph import Groups

from .importance import Int

CostOfWidths = Callable[[Int], Int | int]


@dataclass(frozen=True)
class Unit:
    """A unit in which a budget can be given.

    Attributes:
        name: the key in the recipe's `budget`.
        label: the name in messages and reports.
        cost: function of groups and their widths; None if the unit is measured or learned.
        measured: whether the cost is found by timing networks.
    """

    name: str
    label: str
    cost: Callable[[Groups, Int], Int] | None = None
    measured: bool = False

    def cost_of_widths(self, groups: Groups) -> CostOfWidths:
        """Return the function from widths to their cost.

        Raises:
            ValueError: the unit is measured or learned, not computed.
        """
        cost = self.cost
        if cost is None:
            how = "measured, not computed: call choose_by_latency" if self.measured else "learned, not computed"
            raise ValueError(f"budget.{self.name} is {how}")
        return lambda widths: cost(groups, widths)

    def cost_per_dimension(self, groups: Groups) -> NDArray[np.float64]:
        """Return the cost of one dimension of each group in the dense network.

        Raises:
            ValueError: the unit is measured or learned, not computed.
        """
        cost_of, widths, num_heads = self.cost_of_widths(groups), groups.cost.widths, groups.cost.num_heads
        one_less = cost_of(widths - np.diag(num_heads))  # a row for each group: one dimension less in every head
        per_dimension: NDArray[np.float64] = (int(cost_of(widths)) - one_less) / num_heads
        return per_dimension

    def format(self, cost: float) -> str:
        """Format a cost in this unit, rounded up to four digits so that a reported minimum can be reached.

        >>> UNITS["macs"].format(20_312_345), UNITS["size"].format(1_081_000), UNITS["latency"].format(5)
        ('20.32M', '1.081 MB', '5 ms')
        """
        space = " " if self.name in ("size", "latency") else ""
        ending = {"size": "B", "latency": "ms"}.get(self.name, "")
        scales = () if self.name == "latency" else ((1e9, "G"), (1e6, "M"), (1e3, "k"))
        scale, prefix = next(((s, p) for s, p in scales if cost >= s), (1.0, ""))
        return f"{round_up(cost / scale):.12g}{space}{prefix}{ending}"

    @property
    def for_ranking(self) -> Unit:
        """The computed unit that importance per cost is ranked in: this one, or MACs in place of it."""
        return UNITS["macs"] if self.cost is None else self


UNITS = {
    unit.name: unit
    for unit in (
        Unit("macs", "MACs", lambda groups, widths: groups.cost.macs(widths)),
        Unit("params", "parameters", lambda groups, widths: groups.cost.params(widths)),
        Unit("dims", "dimensions", lambda groups, widths: groups.cost.dims(widths)),
        Unit("size", "file size", lambda groups, widths: groups.cost.size(widths)),
        Unit("latency", "latency", measured=True),
        Unit("auto", "auto"),
    )
}
