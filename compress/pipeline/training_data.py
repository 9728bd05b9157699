"""Training data as search and fine-tuning read it, and their lengths in steps."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from compress.data import accumulate_batches, count_steps, shard_loader, split_into_halves
from compress.recipe import Recipe, describe_defaults
from compress.search import search_class
from compress.training import Engine, Task

from .preflight import CheckedInputs


class TrainingData:
    """This process's share of the training batches for each stage; `train` is None if there is no data."""

    def __init__(self, train: Iterable[Any] | None, recipe: Recipe, engine: Engine, task: Task) -> None:
        self.train, self._recipe, self._engine, self._task = train, recipe, engine, task
        search, finetune = recipe.search.length, recipe.finetune
        self.search_steps = self.finetune_steps = 0  # 0 if there is no such stage
        if search is not None and train is not None:
            self.search_steps = count_steps(self.search_batches(), search, "search.epochs", engine.display)
        if finetune is not None and train is not None:
            length = finetune.epochs
            self.finetune_steps = count_steps(self.finetune_batches(), length, "finetune.epochs", engine.display)

    def search_batches(self) -> Iterable[Any]:
        """Return the batches of the search; for a bilevel search, pairs of batches from two halves of the data."""
        assert self.train is not None
        pairs = search_class(self._recipe.search.method).batches_per_step == 2
        loader = shard_loader(split_into_halves(self.train, self._recipe.seed) if pairs else self.train)
        return accumulate_batches(loader, self._engine.batches_per_step, pairs)

    def finetune_batches(self) -> Iterable[Any]:
        """Return the batches of fine-tuning, accumulated unless the task has its own loop."""
        assert self.train is not None
        loader: Iterable[Any] = shard_loader(self.train)
        if self._task.has_own_fine_tuning:
            return loader
        return accumulate_batches(loader, self._engine.batches_per_step, False)


def describe_data_use(recipe: Recipe, checked: CheckedInputs, data: TrainingData, is_automatic: bool) -> list[str]:
    """Return what the default recipe will do and how long it takes, or that data are given which nothing uses.

    Args:
        recipe: the completed recipe.
        is_automatic: whether the recipe that was given names neither search nor fine-tuning.
    """
    if is_automatic:
        text = describe_defaults(recipe, checked.data, data.search_steps, data.finetune_steps)
        if checked.step_seconds is not None:
            seconds = checked.step_seconds * (data.search_steps + data.finetune_steps)
            text += f"; about {_format_duration(seconds)}, evaluations not included"
        return [text]
    notes = []
    reads_data = recipe.search.length is not None or recipe.finetune is not None or bool(recipe.compensate)
    if not (checked.train is None or reads_data or (recipe.export is not None and recipe.export.int8)):
        notes.append(
            f"nothing trains on the training data: search {recipe.search.method} needs none, and the recipe has no "
            "finetune; add finetune: {}, or leave search out to have the default search and fine-tuning"
        )
    if checked.calibration.given is not None and recipe.compensate != "least_squares":
        notes.append("nothing is repaired on the calibration data: add compensate: least_squares")
    return notes


def _format_duration(seconds: float) -> str:
    """Format a duration for a forecast.

    >>> _format_duration(4.2), _format_duration(75), _format_duration(40000)
    ('5 s', '2 min', '11 h')
    """
    duration = timedelta(seconds=seconds)
    if duration < timedelta(minutes=1):
        return f"{int(seconds) + 1} s"
    if duration < timedelta(hours=2):
        return f"{-(-int(seconds) // 60)} min"
    return f"{seconds / 3600:.0f} h"
