"""Check that a version of ultralytics is installed that this package works with."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

OLDEST = "8.4.190"  # the version that the tests run; earlier ones return losses and build datasets in other ways


def check_ultralytics(oldest: str = OLDEST) -> str:
    """Return the installed version of ultralytics.

    Raises:
        ImportError: it is not installed, or too old.
    """
    command = "pip install -U 'compress[yolo]'"
    try:
        installed = version("ultralytics")
    except PackageNotFoundError:
        raise ImportError(
            f"compress.yolo: expected ultralytics {oldest} or later; it is not installed: {command}"
        ) from None
    if _numbers(installed) < _numbers(oldest):
        raise ImportError(f"compress.yolo: expected ultralytics {oldest} or later; got {installed}: {command}")
    return installed


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
