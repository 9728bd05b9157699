"""Conflicts between sections of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Conflict(NamedTuple):
    """Sections that contradict each other."""

    sections: tuple[str, ...]  # the one to change first
    advice: str


class ConflictError(ValueError):
    """Sections of a recipe contradict each other; `conflicts` lists all of them."""

    def __init__(self, conflicts: Sequence[Conflict]) -> None:
        super().__init__("; ".join(f"{conflict.sections[0]}: {conflict.advice}" for conflict in conflicts))
        self.conflicts = conflicts
