"""Format numbers and values for tables, pages and messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Control characters other than the tab and the end of a line, those that reverse the direction of text, and halves of
# characters, which no encoding has.
_ESCAPED_CODES = (*range(9), *range(11, 32), *range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_ESCAPED_CODES += tuple(range(0xD800, 0xE000))
_ESCAPES = {code: repr(chr(code))[1:-1] for code in _ESCAPED_CODES}
FRACTION_METRICS = ("accuracy", "top5", "agreement")  # shown in percent


def round_up(number: float, digits: int = 4) -> float:
    """Return a number that is not negative, rounded up to so many digits.

    >>> round_up(12.341), round_up(99999), round_up(0.5)
    (12.35, 100000.0, 0.5)
    """
    if not number > 0:
        return 0.0
    places = digits - 1 - math.floor(math.log10(number))
    scaled = math.ceil(round(number * 10.0**places, 6))
    return scaled / 10.0**places if places >= 0 else scaled * 10.0**-places


def format_percent(fraction: float) -> str:
    """Format a fraction as a percentage, rounded up to four digits so that a reported minimum can be reached."""
    return f"{round_up(100 * fraction):.4g}%"


def format_metric(metric: str, value: float) -> str:
    """Format a metric's value: accuracies in percent, others with four digits."""
    return f"{100 * value:.2f} %" if metric in FRACTION_METRICS else f"{value:.4g}"


def format_time(value: float, spread: float | None) -> str:
    """Format a time with its spread, to the digits that are significant given the spread.

    >>> format_time(0.6641, 0.14), format_time(38.4219, 0.612), format_time(1234.5, 123.0), format_time(0.6641, None)
    ('0.66 ± 0.14', '38.42 ± 0.61', '1234 ± 123', '0.6641')
    """
    if spread is None or not 0 < spread < math.inf:
        return f"{value:.4g}" if spread is None else f"{value:.4g} ± {spread:.2g}"
    digits = max(0, 1 - math.floor(math.log10(spread)))
    return f"{value:.{digits}f} ± {spread:.{digits}f}"


def format_count(number: float) -> str:
    """Format a count with three digits and a unit: 1234567 is 1.23M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}" if number < 1000 * size else f"{number / size:.0f}{unit}"
    return f"{number:g}"


def printable(text: str) -> str:
    """Return a text with control characters as escapes, so that no name from a file can steer the terminal.

    >>> print(printable("conv\\x1b[31m"))
    conv\\x1b[31m
    """
    return text.translate(_ESCAPES)


def text_bar(fraction: float, length: int = 8) -> str:
    """Draw a fraction as a bar of block characters."""
    full = round(fraction * length)
    return "█" * full + "░" * (length - full)


def describe_value(value: Any) -> str:
    """Describe the type of a value for an error message, with the shapes of tensors."""
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}"
    if isinstance(value, Mapping):
        return "a dict of " + ", ".join(f"{k!r}: {describe_value(v)}" for k, v in list(value.items())[:6])
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of " + (", ".join(describe_value(v) for v in value[:4]) or "nothing")
    return type(value).__name__
