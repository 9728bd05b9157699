"""The table of groups in a report: one row per group, one definition per column."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compress.formatting import format_count


@dataclass
class GroupRow:
    """One group of the report."""

    name: str
    kind: str
    width: int
    kept: int
    params: int  # of one dimension in the dense model
    macs: int  # likewise
    attention_part: str = ""  # qk, v or qkv; empty if the kind is not attention

    @property
    def kind_and_part(self) -> str:
        """Return the kind with the part of attention: `mlp`, `attention qk`."""
        return f"{self.kind} {self.attention_part}".rstrip()


@dataclass(frozen=True)
class GroupColumn:
    """A column of the table, in the terminal and on the page."""

    header: str
    cell: Callable[[GroupRow], str | float]  # text, or a fraction that is drawn as a bar
    align_right: bool = True


GROUP_COLUMNS = (
    GroupColumn("group", lambda row: row.name, align_right=False),
    GroupColumn("kind", lambda row: row.kind, align_right=False),
    GroupColumn("width", lambda row: str(row.width)),
    GroupColumn("kept", lambda row: str(row.kept)),
    GroupColumn("", lambda row: row.kept / max(row.width, 1), align_right=False),
    GroupColumn("params/dim", lambda row: format_count(row.params)),
    GroupColumn("MACs/dim", lambda row: format_count(row.macs)),
)
