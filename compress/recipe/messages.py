"""Wording that error messages about recipes share."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

MAX_REPR = 120  # characters
MAX_NAME = 80  # characters


def short_repr(value: Any) -> str:
    """Return the repr of a value, shortened if it is long."""
    try:
        text = repr(value)
    except Exception:  # such as an integer of more digits than Python prints
        text = f"something of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= MAX_REPR else f"{text[:100]}... ({len(text)} characters)"


def dotted_key(key: tuple[Any, ...]) -> str:
    """Return the full name of a key; parts that cannot be printed are quoted.

    >>> dotted_key(("target", "bounds", "0", ""))
    "target.bounds.0.''"
    """
    return ".".join(
        str(part) if 0 < len(str(part)) <= MAX_NAME and str(part).isprintable() else short_repr(part) for part in key
    )


def nearest_name(name: str, known_names: Sequence[str]) -> str | None:
    """Return the known name that is most like `name`, whatever its case, or None if none is similar."""
    by_lower_case = {known.lower(): known for known in known_names}
    nearest = difflib.get_close_matches(name[:MAX_NAME].lower(), by_lower_case, n=1)
    return by_lower_case[nearest[0]] if nearest else None


def did_you_mean(name: str, known_names: Sequence[str]) -> str:
    """Return a question that names the nearest known name, or "" if none is similar.

    >>> did_you_mean("atuo", ["auto"])
    ' Did you mean auto?'
    """
    nearest = nearest_name(name, known_names)
    return f" Did you mean {nearest}?" if nearest else ""


def describe_kind(data: Any) -> str:
    """Name the kind of a YAML value.

    >>> describe_kind(None), describe_kind([1]), describe_kind("a")
    ('nothing', 'a list', 'text')
    """
    if isinstance(data, Mapping):
        return "keys"
    if isinstance(data, (int, float)) and not isinstance(data, bool):
        return "a number"
    kinds = {type(None): "nothing", list: "a list", str: "text", bool: "true or false"}
    return kinds.get(type(data), type(data).__name__)
