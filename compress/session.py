"""Session: a search inside somebody else's training loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .api import Pruned
from .checkpoint import own_randomness
from .display import Display
from .engine import Engine, pick_device
from .preflight import NotReady, unwrapped
from .recipe import Recipe
from .run import Run
from .task import BatchError, Task, describe
from .watch import watched


class Session:
    """Scores are attached to `model`, a copy; `step` trains it on a batch, `finish` cuts it."""

    def __init__(self, run: Run, steps: int) -> None:
        self._run, self.steps, self.done, self._finished = run, steps, 0, False
        self.groups = run.find()
        self._search = run.begin_search(self.groups, steps)
        self._step = watched(self._search, "search", run.engine.facts.setdefault("scores", []))
        if self._search.trains:
            self.model.train()

    @property
    def model(self) -> nn.Module:
        """The network under search, with its scores: to look at or to evaluate."""
        return self._run.compact

    def step(self, batch: Any) -> dict[str, float]:
        """Train weights and scores on one batch; returns the terms of the loss.

        A bilevel search (rarts, darts, milenas) is fed a pair of batches, from two halves of the data.

        Raises:
            RuntimeError: all its steps are made, or it is finished.
            BatchError: the search is fed pairs, and this is none.
            Diverged: the loss is not finite.
        """
        self._check_open()
        if self.done >= self.steps:
            raise RuntimeError(
                f"the session was to make {self.steps} steps and has made them: call finish(), or start one with more"
            )
        if self._search.reads == 2:
            self._check_pair(batch)
        self.done += 1
        terms = self._step(self._run.engine.move(batch))
        values = {key: float(value) for key, value in terms.items()}
        self._run.engine.check_finite("search", self.done, self.steps, values)
        self._run.engine.record({"stage": "search", "step": self.done, "epoch": 0.0}, values)
        return values

    def finish(self) -> Pruned:
        """Choose by the budget, fold, slice; fine-tune the result in your own way.

        Raises:
            BudgetError: the budget is out of reach.
            RuntimeError: it is finished already.
        """
        self._check_open()
        run, self._finished = self._run, True
        if self.done < self.steps and run.recipe.search.settles:
            warnings.warn(
                f"the session was to make {self.steps} steps and made {self.done}: scores that are to be cut have not "
                "come to zero yet, so the cut changes what the network computes",
                stacklevel=2,
            )
        importance = run.end_search(self._search)
        run.cut(self.groups, run.choose(self.groups, importance))
        run.engine.facts["sliced"] = run.engine.evaluate(run.task, run.compact)
        run.evaluate_dense()
        return Pruned(run.compact, run.plan, run.measure())

    def _check_pair(self, batch: Any) -> None:
        """Whether these are two batches; those of (input, target) are two things as well."""
        try:
            first, second = batch if isinstance(batch, (tuple, list)) else ()
            self._run.task.inputs(first), self._run.task.inputs(second)
        except Exception as error:  # whatever a task says to what is no batch
            raise BatchError(
                f"search {self._run.recipe.search.method}: expected a pair of batches, from two halves of the data; "
                f"got {describe(batch)}. Call session.step((a, b)) with a batch of each"
            ) from error

    def _check_open(self) -> None:
        if self._finished:
            raise RuntimeError("the session is finished; start another with compress.search_session")


def search_session(
    model: nn.Module,
    recipe: str | Path | Mapping[str, Any] | Recipe,
    *,
    steps: int | None = None,
    train: Iterable[Any] | None = None,
    val: Iterable[Any] | None = None,
    task: Task | None = None,
    example_inputs: Any = None,
    device: str | torch.device | None = None,
) -> Session:
    """Begin a search that your own loop drives: `session.step(batch)` for each batch, then `session.finish()`.

    `steps` is how many steps the loop will make (default: the recipe's, which needs `train` if it counts in epochs).
    The sections `finetune` and `export` of the recipe are ignored: `finish` cuts and measures, and no more. Fine-tune
    the result in a loop of your own, with `compress.distillation` as the loss; `compress.prune` does all of it.

    Raises:
        NotReady: something is missing, or the recipe asks for what a session cannot do.
    """
    recipe, model = Recipe.load(recipe), unwrapped(model)
    length = recipe.search.length
    if length is None:
        raise NotReady(f"search.method: {recipe.search.method} reads no data; use compress.prune(model, recipe)")
    if recipe.steps > 1:
        raise NotReady("steps: a session makes one round of search and cut; leave steps out, or use compress.prune")
    if steps is None and length.unit == "epochs" and train is None and getattr(task, "train", None) is None:
        raise NotReady(f"steps: {length} of data that the session does not see; say steps=LENGTH")
    if steps is not None and (not isinstance(steps, Integral) or steps < 1):
        raise NotReady(f"steps: expected how many batches the loop will feed, 1 or more; got {steps!r}")
    alone = recipe.model_copy(update={"finetune": None, "export": None})
    engine = Engine(pick_device(device, model), recipe.seed, Display(quiet=True), config=recipe.engine)
    with own_randomness():
        run = Run(
            model, alone, engine, train=train, val=val, task=task, example_inputs=example_inputs, fed=train is None
        )
        return Session(run, steps if steps is not None else run.length("search"))
