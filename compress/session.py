"""Session: a search in the user's own training loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from numbers import Integral
from typing import Any

import torch
from torch import nn

from compress.api import Pruned, RecipeLike
from compress.errors import BatchError, NotReady
from compress.formatting import describe_value
from compress.graph import Groups
from compress.modules import unwrap_model, unwrap_teacher
from compress.pipeline import OperationSearch, Run, SearchResult, UserInputs, cut_to_budget, finish_search, start_search
from compress.progress import ProgressDisplay
from compress.recipe import Budget, Recipe, config_class, read_budget
from compress.search import CostHistory, record_costs, record_scores
from compress.storage import isolated_random_state
from compress.training import Engine, TaskLike, pick_device


class Session:
    """A search in progress: scores are attached to `model`, a copy; `step` trains it, `finish` cuts it."""

    def __init__(self, run: Run, steps: int) -> None:
        self._run, self.steps, self.done, self._finished = run, steps, 0, False
        self._result: SearchResult | None = None  # of the finished search
        self._operations = OperationSearch(run, steps) if run.recipe.target.operations else None
        self.groups = run.find_groups() if self._operations is None else Groups.empty()
        self._search = start_search(run, self.groups, steps) if self._operations is None else self._operations.search
        state = run.engine.run_state
        step = record_scores(self._search, "search", state.score_history())
        self._step = record_costs(step, self._search, "search", state.cost_history())
        if self._search.trains:
            self.model.train()

    @property
    def model(self) -> nn.Module:
        """The network in search, with its scores, for inspection and evaluation."""
        return self._run.compact

    def step(self, batch: Any) -> dict[str, float]:
        """Train weights and scores on one batch; return the terms of the loss.

        A bilevel search (rarts, darts, milenas) takes a pair of batches, from two halves of the data.

        Raises:
            RuntimeError: all steps are done, or the session is finished.
            BatchError: the search takes pairs of batches, and this is not one.
            Diverged: the loss is not finite.
        """
        self._check_open()
        if self.done >= self.steps:
            raise RuntimeError(
                f"the session has made all of its {self.steps} steps: call finish(), or start a session with more"
            )
        if self._search.batches_per_step == 2:
            self._check_pair(batch)
        self.done += 1
        terms = self._step(self._run.engine.move(batch))
        values = {key: float(value) for key, value in terms.items()}
        self._run.engine.check_finite("search", self.done, self.steps, values)
        self._run.engine.record({"stage": "search", "step": self.done, "epoch": 0.0}, values)
        return values

    def costs(self) -> list[CostHistory]:
        """Return the signed costs of the scores so far: one history for each half of the data that the search uses.

        Above zero, the search wants a group smaller. Empty if the search trains no scores, or with `costs: false`.
        """
        return [copy.deepcopy(CostHistory.from_dict(costs)) for costs in self._run.engine.run_state.cost_history()]

    def finish(self, budget: float | str | dict[str, Any] | Budget | None = None) -> Pruned:
        """Fold the scores, choose widths by the budget and slice; fine-tune the result in your own loop.

        Call it again for other budgets: each call cuts a copy of the searched network. No step may follow.

        Args:
            budget: what is left, in the unit of the recipe's budget, or a whole budget; default: the recipe's.

        Raises:
            BudgetError: the budget cannot be met.
            ValueError: `budget` is not one.
            RuntimeError: the session chooses operations, and a budget is given or they are chosen already.
        """
        run = self._run
        if self._operations is not None:
            return self._finish_operations(budget)
        wanted = None if budget is None else read_budget(budget, run.recipe.budget.unit)
        is_first, self._finished = not self._finished, True
        if wanted is not None and wanted != run.recipe.budget and run.recipe.search.meets_budget:
            warnings.warn(
                f"the scores of the dimensions that {run.recipe.budget} drops are zero; a cut to {wanted} drops others "
                "as well, or keeps some that are zero. Start a session with that budget, or give gamma a number",
                stacklevel=2,
            )
        if is_first and self.done < self.steps and run.recipe.search.meets_budget:
            warnings.warn(
                f"the session has made {self.done} of its {self.steps} steps: the scores of the dropped dimensions "
                "have not reached zero yet, so the cut changes the outputs of the network",
                stacklevel=2,
            )
        if self._result is None:
            self._result = finish_search(run, self._search)
        cut = cut_to_budget(run, self.groups, self._result, wanted)
        return Pruned(cut.compact, cut.plan, cut.measure())

    def _check_pair(self, batch: Any) -> None:
        """Check that the task accepts both parts as batches; a single (input, target) batch has two parts as well."""
        try:
            first, second = batch if isinstance(batch, (tuple, list)) else ()
            self._run.task.inputs(first), self._run.task.inputs(second)
        except Exception as error:  # of any type: the task's own code fails
            raise BatchError(
                f"search {self._run.recipe.search.method}: expected a pair of batches, from two halves of the data; "
                f"got {describe_value(batch)}. Call session.step((a, b)) with a batch of each"
            ) from error

    def _finish_operations(self, budget: Any) -> Pruned:
        """Keep the chosen operations; there is one choice, which a budget does not change."""
        run = self._run
        assert self._operations is not None
        if self._finished:
            raise RuntimeError("the session is finished; operations are chosen once")
        if budget is not None:
            raise RuntimeError(
                f"finish: operations are chosen once, by the budget of the recipe; got budget={budget!r}. Call "
                "finish(), or start a session whose recipe has that budget"
            )
        self._finished = True
        self._operations.finish_()
        run.evaluate_sliced()
        run.evaluate_dense()
        return Pruned(run.compact, run.plan, run.measure())

    def _check_open(self) -> None:
        if self._finished:
            raise RuntimeError("the session is finished; start another with compress.search_session")


def search_session(
    model: nn.Module,
    recipe: RecipeLike,
    *,
    steps: int | None = None,
    train: Iterable[Any] | None = None,
    val: Iterable[Any] | None = None,
    test: Iterable[Any] | None = None,
    task: TaskLike | None = None,
    example_inputs: Any = None,
    teacher: nn.Module | None = None,
    device: str | torch.device | None = None,
) -> Session:
    """Start a search in your own loop: call `session.step(batch)` for each batch, then `session.finish()`.

    The sections `finetune` and `export` of the recipe are ignored: `finish` cuts and measures. Fine-tune the result in
    your own loop with `compress.distillation` as the loss, or use `compress.prune`, which does everything.

    Args:
        model: the trained dense model; it is not changed.
        recipe: name of a packaged recipe, path of a YAML file, dict or `Recipe`.
        steps: number of steps that the loop will make; default: the recipe's, which needs `train` to count epochs.
        train: loader of (input, target) batches, to count epochs and to take the example inputs from.
        val: loader for evaluation.
        test: loader that chooses nothing: `finish` evaluates dense and cut network on it.
        task: loss, evaluation and data of anything other than classification; replaces `train` and `val`.
        example_inputs: arguments of the model; default: the inputs of the first training batch.
        teacher: network that the search distils from; default: `model` as it is.
        device: default: a GPU if there is one.

    Raises:
        RecipeError: the recipe is invalid.
        NotReady: something is missing, or the recipe needs something that a session cannot do.
    """
    recipe, model = Recipe.load(recipe), unwrap_model(model)
    teacher = None if teacher is None or teacher is model else unwrap_teacher(teacher)
    if recipe.is_automatic:
        recipe = recipe.model_copy(update={"search": config_class("netslim")(method="netslim")})
    length = recipe.search.length
    if length is None:
        raise NotReady(f"search.method: {recipe.search.method} needs no data; use compress.prune(model, recipe)")
    if recipe.target.operations and recipe.target.widths:
        raise NotReady("target: a session chooses operations or cuts widths; leave out one, or use compress.prune")
    if recipe.steps > 1:
        raise NotReady("steps: a session makes one round of search and cut; leave steps out, or use compress.prune")
    if steps is None and length.unit == "epochs" and train is None and getattr(task, "train", None) is None:
        raise NotReady(f"steps: the length is {length}, and the session has no data to count them; give steps=NUMBER")
    if steps is not None and (not isinstance(steps, Integral) or steps < 1):
        raise NotReady(f"steps: expected the number of steps that the loop will make, 1 or more; got {steps!r}")
    search_only = recipe.model_copy(update={"finetune": None, "export": None})
    engine = Engine(pick_device(device, model), recipe.seed, ProgressDisplay(quiet=True), config=recipe.engine)
    with isolated_random_state():
        inputs = UserInputs(train, val, task, example_inputs, teacher, test=test, brings_batches=train is None)
        run = Run(model, search_only, engine, inputs)
        if steps is None:
            steps = run.data.search_steps or length.steps(None)
        return Session(run, steps)
