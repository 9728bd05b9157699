"""Run Ultralytics' trainers and validators inside a run: without output, uploads and downloads."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import ultralytics.data.utils as data_utils
from ultralytics.utils import LOGGER


class NoCallbacks(dict[str, list[Any]]):
    """Callbacks that stay as they were given: what Ultralytics' integrations append for other events is dropped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.setdefault("teardown", [])  # empty callbacks would be replaced by the default ones

    def __missing__(self, event: str) -> list[Any]:
        return []


@contextmanager
def quiet() -> Iterator[None]:
    """Print only errors of Ultralytics in the block, and fetch no font, which only plots need."""
    level, check_font = LOGGER.level, data_utils.check_font
    LOGGER.setLevel(logging.ERROR)
    data_utils.check_font = lambda *args, **kwargs: None
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        LOGGER.setLevel(level)
        data_utils.check_font = check_font


def plain_text(error: BaseException) -> str:
    """Return the message of an error of Ultralytics in one line, without colours and its full stop.

    >>> plain_text(ValueError("\\x1b[34mtrain:\\x1b[0m no\\nimages."))
    'train: no images'
    """
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split()).removesuffix(".")
