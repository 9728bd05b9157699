"""The table of operations in a report: one row per group of choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compress.formatting import format_count


@dataclass
class OperationRow:
    """One group of choices that have the same scores."""

    name: str
    places: int  # choices in the group
    chosen: str
    strengths: dict[str, float]  # candidate -> strength at the end of the search, larger is better
    macs: dict[str, int]  # candidate -> multiply-adds in all places
    params: dict[str, int]  # likewise

    @property
    def others(self) -> str:
        """Return the other candidates with their strengths, the strongest first."""
        others = sorted((name for name in self.strengths if name != self.chosen), key=lambda n: -self.strengths[n])
        return ", ".join(f"{name} {self.strengths[name]:.3g}" for name in others)


@dataclass(frozen=True)
class OperationColumn:
    """A column of the table, in the terminal and on the page."""

    header: str
    cell: Callable[[OperationRow], str]
    align_right: bool = False


OPERATION_COLUMNS = (
    OperationColumn("choice", lambda row: row.name),
    OperationColumn("chosen", lambda row: row.chosen),
    OperationColumn("strength", lambda row: f"{row.strengths[row.chosen]:.3g}", align_right=True),
    OperationColumn("places", lambda row: str(row.places), align_right=True),
    OperationColumn("MACs", lambda row: format_count(row.macs[row.chosen]), align_right=True),
    OperationColumn("params", lambda row: format_count(row.params[row.chosen]), align_right=True),
    OperationColumn("removed", lambda row: row.others),
)
