"""The part that cuts to several budgets have in common: groups, the metrics of the dense model, and the search."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.distributed import on_rank_zero
from compress.errors import BudgetError
from compress.graph import Groups
from compress.modules import trainable_copy
from compress.recipe import Budget, Recipe
from compress.storage import CheckpointStore, load_training_tensors_, tensors_under, training_tensors

from .run import Run
from .search_stage import SearchResult

RESULT_FOLDER = "result"  # in the working directory of the search


@dataclass(frozen=True)
class SharedSearch:
    """Groups, results and weights that the cuts to several budgets start from.

    Attributes:
        result: importance; None if every budget needs a search of its own.
        weights: the network after the search; empty if every budget needs a search of its own.
        dense_metrics, scores, costs, history, seconds, gradients: what the report and the engine of each cut continue
            with.
    """

    groups: Groups
    result: SearchResult | None
    weights: dict[str, Tensor]
    dense_metrics: dict[str, float]
    scores: list[dict[str, Any]]
    costs: list[dict[str, Any]]
    history: list[dict[str, Any]]
    seconds: dict[str, float]
    gradients: dict[str, float]

    @classmethod
    def run(cls, run: Run, budgets: Sequence[Budget], workdir: Path | None) -> SharedSearch:
        """Find the groups, check that all budgets can be met, evaluate the dense model, and search once if possible.

        Args:
            run: a run that was just started.
            budgets: of the cuts.
            workdir: of the run; a finished search is kept in it.

        Raises:
            BudgetError: some budgets cannot be met; the message lists them.
            ValueError: the saved search is damaged, or of another run.
        """
        groups = run.find_groups(check_budget=False)
        _check_budgets(run, groups, budgets)
        run.evaluate_dense()
        engine, store = run.engine, None if workdir is None else CheckpointStore(workdir / RESULT_FOLDER)
        saved = None if store is None else on_rank_zero(store.load)
        if saved is not None:
            return cls._restore(run, groups, *saved)
        result, weights = None, {}
        offered = replace(groups, refused=list(groups.refused), notes=list(groups.notes))
        if can_share_search(run.recipe):
            result = run.search(groups)
            weights = {name: t.detach().clone() for name, t in training_tensors(run.compact).items()}
        shared = cls(
            offered,
            result,
            weights,
            engine.run_state.dense_metrics or {},
            engine.run_state.scores or [],
            engine.run_state.costs or [],
            engine.history,
            engine.seconds,
            engine.gradient_computer.state,
        )
        if store is not None and result is not None:
            on_rank_zero(lambda: shared._save(store, engine.run_state.run_digest))
        return shared

    def apply_(self, run: Run) -> Groups:
        """Give a run what is shared; return the groups, which the run may change."""
        state, engine = run.engine.run_state, run.engine
        state.dense_metrics, state.scores = dict(self.dense_metrics), list(self.scores)
        state.costs = list(self.costs)
        engine.history, engine.seconds = list(self.history), dict(self.seconds)
        if self.result is not None:
            load_training_tensors_(run.compact, self.weights)
            run.compact.eval()
            engine.gradient_computer.restore_(self.gradients)
        return replace(self.groups, refused=list(self.groups.refused), notes=list(self.groups.notes))

    def _save(self, store: CheckpointStore, run_digest: str | None) -> None:
        assert self.result is not None
        store.path.parent.mkdir(exist_ok=True)
        tensors = {f"weights/{name}": t for name, t in self.weights.items()}
        tensors |= {f"importance/{name}": t for name, t in self.result.importance.items()}
        kernels = {name: {str(d): list(kept) for d, kept in dims.items()} for name, dims in self.result.kernels.items()}
        values = {key: value for key, value in vars(self).items() if key not in ("groups", "result", "weights")}
        values |= {"run": run_digest, "notes": self.result.notes, "kernels": kernels}
        store.save(tensors, values)

    @classmethod
    def _restore(cls, run: Run, groups: Groups, tensors: dict[str, Tensor], values: dict[str, Any]) -> SharedSearch:
        if values["run"] != run.engine.run_state.run_digest:
            raise ValueError(f"{RESULT_FOLDER}: belongs to another search; start again in another workdir")
        kernels = {
            name: {int(d): (kept[0], kept[1]) for d, kept in dims.items()} for name, dims in values["kernels"].items()
        }
        result = SearchResult(tensors_under(tensors, "importance/"), values["notes"], kernels)
        names = ("dense_metrics", "scores", "costs", "history", "seconds", "gradients")
        return cls(groups, result, tensors_under(tensors, "weights/"), *(values[name] for name in names))


def can_share_search(recipe: Recipe) -> bool:
    """Return whether one search serves every budget: it does not work towards a budget, and all is cut at once.

    A search with `gamma: auto` brings the scores of the dimensions that its budget drops to zero, and the later rounds
    of several search what the earlier ones left; both need a search per budget.
    """
    return recipe.steps == 1 and not recipe.search.meets_budget


def _check_budgets(run: Run, groups: Groups, budgets: Sequence[Budget]) -> None:
    """Check each budget as a run of its own would before its search.

    Raises:
        BudgetError: some cannot be met.
    """
    recipe, problems = run.recipe, []
    for budget in budgets:
        run.recipe = recipe.model_copy(update={"budget": budget})
        run.engine.run_state.dense_costs = None
        try:
            run.check_budget(groups)
        except BudgetError as error:
            problems.append(str(error))
    if problems:
        raise BudgetError("\n".join(problems))
    run.recipe, run.engine.run_state.dense_costs = recipe, None
    with suppress(BudgetError):  # the recipe's own budget is that of no cut
        run.check_budget(groups)


def cut_to_budget(run: Run, groups: Groups, result: SearchResult, budget: Budget | None) -> Run:
    """Cut a copy of the network of a run whose search is finished, and evaluate it; the run itself stays as it is.

    Args:
        budget: default: that of the recipe.

    Raises:
        BudgetError: the budget cannot be met.
    """
    run.evaluate_dense()
    cut, state = copy.copy(run), replace(run.engine.run_state)
    cut.compact, cut.engine = trainable_copy(run.compact), copy.copy(run.engine)
    cut.engine.run_state, cut.engine.history = state, list(run.engine.history)
    cut.engine.seconds = dict(run.engine.seconds)
    groups = replace(groups, refused=list(groups.refused), notes=list(groups.notes))
    if budget is not None:
        cut.recipe, state.dense_costs = run.recipe.model_copy(update={"budget": budget}), None
        cut.check_budget(groups)
    cut.cut_(groups, cut.choose_plan(groups, result), result)
    cut.evaluate_sliced()
    return cut
