"""Tracking: what is measured goes to TensorBoard and whatever else accelerate knows, beside the history."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.tracking import _available_trackers as available

from .engine import Engine
from .files import TRACK
from .recipe import Recipe


def objections(recipe: Recipe, workdir: Path | None) -> list[str]:
    """Why the trackers of a recipe cannot be used here."""
    wrong: list[str] = []
    there = {str(tracker.value) for tracker in available}
    for name in recipe.engine.track:
        if name not in LOGGER_TYPE_TO_CLASS:
            near = difflib.get_close_matches(name, LOGGER_TYPE_TO_CLASS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            wrong.append(f"engine.track: expected some of {', '.join(LOGGER_TYPE_TO_CLASS)}; got {name!r}.{hint}")
        elif name not in there:
            wrong.append(f"engine.track: {name} is not installed here; pip install {name}, or leave it out")
        elif LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and workdir is None:
            wrong.append(f"engine.track: {name} writes files, and there is no workdir; give workdir=FOLDER")
    return wrong


@contextmanager
def tracking(engine: Engine, recipe: Recipe, workdir: Path | None) -> Iterator[None]:
    """The recipe's trackers are told what is measured inside."""
    if recipe.engine.track:
        PartialState()  # which they ask who is the first
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    name = workdir.name if workdir is not None else "compress"
    for kind in recipe.engine.track:
        made: Any = LOGGER_TYPE_TO_CLASS[kind]
        where = {"logging_dir": str(workdir / TRACK)} if made.requires_logging_directory and workdir else {}
        tracker = made(name, **where)
        tracker.start()
        tracker.store_init_configuration(_flat(recipe.model_dump(mode="json", exclude_none=True)))
        engine.trackers.append(tracker)
    try:
        yield
    finally:
        for tracker in engine.trackers:
            tracker.finish()
        engine.trackers.clear()


def _flat(values: Any, path: str = "") -> dict[str, Any]:
    """Settings as trackers want them: name -> text or number."""
    if isinstance(values, dict):
        pairs = (_flat(value, f"{path}.{key}" if path else str(key)) for key, value in values.items())
        return {name: value for part in pairs for name, value in part.items()}
    return {path: values if isinstance(values, (bool, int, float, str)) else str(values)}
