"""Values of an evaluation that takes long, in a file from which the next call continues."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from compress.distributed import broadcast_object, rank
from compress.storage import read_json, write_atomic

SAVE_INTERVAL = 30.0  # seconds between two writes


class UnfinishedValues:
    """The values found so far, in their order; written to a file now and then, and when the evaluation is stopped.

    Args:
        path: of the file; None keeps nothing.
        identity: of what is evaluated; the file of anything else is not read.

    Attributes:
        values: those found, NaN where they are not finite.
    """

    def __init__(self, path: Path | None, identity: str) -> None:
        self.path, self.identity = path, identity
        self.values: list[float] = broadcast_object(self._read())
        self._last_save = time.monotonic()

    def append(self, value: float) -> None:
        """Add a value; write the file if it is time."""
        self.values.append(value if math.isfinite(value) else math.nan)
        if time.monotonic() - self._last_save > SAVE_INTERVAL:
            self.save()

    def save(self) -> None:
        """Write the file, atomically."""
        if self.path is not None and self.values and rank() == 0:
            values = [None if math.isnan(value) else value for value in self.values]
            write_atomic(self.path, json.dumps({"identity": self.identity, "values": values}).encode())
        self._last_save = time.monotonic()

    def delete(self) -> None:
        """Remove the file."""
        if self.path is not None and rank() == 0:
            self.path.unlink(missing_ok=True)

    def _read(self) -> list[float]:
        """Return the values of the file; none if there is no file, or it is damaged or of another evaluation."""
        if self.path is None or rank() or not self.path.exists():
            return []
        try:
            data = read_json(self.path)
            if data["identity"] != self.identity:
                return []
            return [math.nan if value is None else float(value) for value in data["values"]]
        except (ValueError, TypeError, LookupError):
            return []
