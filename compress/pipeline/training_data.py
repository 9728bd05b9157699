"""Training data as search and fine-tuning read it, and their lengths in steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from compress.data import accumulate_batches, count_steps, shard_loader, split_into_halves
from compress.recipe import Recipe
from compress.search import search_class
from compress.training import Engine, Task


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
        return accumulate_batches(loader, self._engine.config.batches_per_step, pairs)

    def finetune_batches(self) -> Iterable[Any]:
        """Return the batches of fine-tuning, accumulated unless the task has its own loop."""
        assert self.train is not None
        loader: Iterable[Any] = shard_loader(self.train)
        if self._task.has_own_fine_tuning:
            return loader
        return accumulate_batches(loader, self._engine.config.batches_per_step, False)
