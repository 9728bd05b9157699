"""Strict reading of JSON files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 28  # of a plan


def read_json(path: Path) -> Any:
    """Return the data of a JSON file without duplicate keys and with finite numbers.

    Raises:
        ValueError: it is not JSON, too large, nested too deeply, or has a duplicate key or a number that is not finite.
        OSError: it cannot be read.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(values := dict(pairs)) < len(pairs):
            raise ValueError("a key is given twice")
        return values

    def finite(text: str) -> float:
        if not math.isfinite(number := float(text)):
            raise ValueError(f"expected finite numbers; got {text[:20]}")
        return number

    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES >> 20} MB; got {size} bytes")
    try:
        return json.loads(
            path.read_bytes(), object_pairs_hook=without_duplicates, parse_float=finite, parse_constant=finite
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
