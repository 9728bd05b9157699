"""Experiment trackers: pass measured values to TensorBoard and the other trackers that accelerate supports."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress.recipe import Recipe
from compress.storage import TRACKER_FOLDER

from .engine import Engine


def tracker_problems(recipe: Recipe, workdir: Path | None) -> list[str]:
    """Return why trackers of a recipe cannot be used."""
    if not recipe.engine.track:
        return []
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, _available_trackers

    problems: list[str] = []
    installed = {str(tracker.value) for tracker in _available_trackers}
    for name in recipe.engine.track:
        if name not in LOGGER_TYPE_TO_CLASS:
            closest = difflib.get_close_matches(name, LOGGER_TYPE_TO_CLASS, n=1)
            hint = f" Did you mean {closest[0]}?" if closest else ""
            problems.append(f"engine.track: expected some of {', '.join(LOGGER_TYPE_TO_CLASS)}; got {name!r}.{hint}")
        elif name not in installed:
            problems.append(f"engine.track: {name} is not installed; pip install {name}, or leave it out")
        elif LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and workdir is None:
            problems.append(f"engine.track: {name} writes files, and there is no workdir; give workdir=FOLDER")
    return problems


@contextmanager
def trackers_running(engine: Engine, recipe: Recipe, workdir: Path | None) -> Iterator[None]:
    """Run the trackers of a recipe during the block."""
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    if recipe.engine.track:
        engine.trackers += _start_trackers(recipe, workdir)
    try:
        yield
    finally:
        for tracker in engine.trackers:
            tracker.finish()
        engine.trackers.clear()


def _start_trackers(recipe: Recipe, workdir: Path | None) -> Iterator[Any]:
    """Yield the trackers of a recipe, each as soon as it is started."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # trackers ask it for the main process
    name = workdir.name if workdir is not None else "compress"
    for kind in recipe.engine.track:
        tracker_class: Any = LOGGER_TYPE_TO_CLASS[kind]
        folder = workdir / TRACKER_FOLDER if tracker_class.requires_logging_directory and workdir else None
        tracker = tracker_class(name, **({} if folder is None else {"logging_dir": str(folder)}))
        tracker.start()
        tracker.store_init_configuration(_flatten(recipe.model_dump(mode="json", exclude_none=True)))
        yield tracker


def _flatten(values: Any, path: str = "") -> dict[str, Any]:
    """Return nested settings as trackers need them: dotted name -> text or number."""
    if isinstance(values, dict):
        pairs = (_flatten(value, f"{path}.{key}" if path else str(key)) for key, value in values.items())
        return {name: value for part in pairs for name, value in part.items()}
    return {path: values if isinstance(values, (bool, int, float, str)) else str(values)}
