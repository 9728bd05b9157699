"""Bounds of groups as text that the user may copy into a recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

HINT = "# Losses of several groups add up. Nothing reads these bounds unless you copy them into a recipe."


@dataclass(frozen=True)
class SuggestedBound:
    """The narrowest width of a group that loses no more than is allowed, and what the next one gives."""

    name: str
    least: int
    width: int
    narrower: int
    value: str  # of the metric at the narrower width

    def __str__(self) -> str:
        """Return the line of a recipe."""
        remark = f"of {self.width}; {self.value} at {self.narrower}"
        return f"    {_yaml_key(self.name)}: {{least: {self.least}}}  # {remark}"


def recipe_text(bounds: Sequence[SuggestedBound], limit: str, measured_on: str) -> str:
    """Return the section of a recipe with these bounds.

    Args:
        limit: what a group may lose, as text.
        measured_on: how the loss was measured, as text.
    """
    if not bounds:
        return f"# No group alone loses more than {limit} at the widths that were measured: no bounds.\n"
    title = f"# Each of these groups alone loses more than {limit} below its bound ({measured_on})."
    return "\n".join([title, HINT, "target:", "  bounds:", *map(str, bounds)]) + "\n"


def _yaml_key(name: str) -> str:
    """Return a name as the key of a mapping, in quotes if YAML would read something else."""
    is_plain = re.fullmatch(r"[A-Za-z_][\w.]*", name) and yaml.safe_load(name) == name
    return name if is_plain else json.dumps(name)
