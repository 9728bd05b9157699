"""The search stage: attach scores, train, fold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from compress.budget import PruningSchedule
from compress.data import derive_seed, num_batches
from compress.distributed import broadcast_module_, broadcast_object
from compress.errors import NotReady
from compress.graph import Groups
from compress.modules import shared_copy
from compress.search import Job, Search, record_costs, record_scores, search_class
from compress.storage import TrainingState, seed_all
from compress.surgery import fold_
from compress.training import synchronized_batch_norms

from .calibration import prefer_predictors_for_repair
from .context import RunContext


@dataclass(frozen=True)
class SearchResult:
    """Importance of every dimension by group, notes for the report, and convolution kernels that can be smaller."""

    importance: dict[str, Tensor]
    notes: list[str]
    kernels: dict[str, dict[int, tuple[int, int]]]  # weight -> dimension -> (start, end)


def start_search(run: RunContext, groups: Groups, steps: int | None = None) -> Search:
    """Return the recipe's search, with its scores attached to the network.

    Args:
        run: the run; its network gets the scores.
        groups: the groups of the network.
        steps: length of the search; default: this round's share of the recipe's.

    Raises:
        NotReady: there is nothing to cut.
    """
    recipe = run.recipe
    if recipe.search.length is not None and not len(groups):
        reasons = "; ".join([*sorted({r.explanation for r in groups.refused})[:4], *groups.notes[-3:]])
        raise NotReady(f"target: there is nothing to cut; refused groups: {len(groups.refused)}; reasons: {reasons}")
    seed_all(derive_seed(recipe.seed, "search", run.round_index))
    job = Job(
        run.compact,
        groups,
        run.task,
        steps if steps is not None else run.current_round.search_steps(run.data.search_steps),
        recipe.seed,
        teacher=run.teacher,
        gradient_computer=run.engine.gradient_computer,
    )
    if run.data.train is not None:
        job.steps_per_epoch = num_batches(run.data.search_batches())
    if len(groups):
        schedule = PruningSchedule(
            recipe,
            groups,
            shared_copy(run.compact),
            run.reference,
            run.example_inputs,
            run.plan.widths or None,
            run.round_index,
            run.engine.display,
            limits=run.current_round.limits(groups),
        )
        job.schedule = None if recipe.budget.auto else schedule
        job.dimension_times = schedule.dimension_times
    return search_class(recipe.search.method)(recipe.search, job)


def train_search(run: RunContext, search: Search, stage: Literal["search", "operations"] = "search") -> None:
    """Run all steps of a search, from the last checkpoint if it was stopped in this stage."""
    if search.trains:
        run.compact.train()
    state = TrainingState({"model": run.compact}, search.optimizers, search.state)
    position = run.restore_search_(state, stage)
    if position is not None:
        position = run.processes.rescaled(position, search.job.steps)
    search.done = position.done if position else 0
    name = stage if run.recipe.steps == 1 or stage == "operations" else f"search {run.round_index + 1}"
    run.engine.run_state.stage = stage
    with synchronized_batch_norms(run.compact, run.engine):
        step = record_scores(search, name, run.engine.run_state.score_history())
        step = record_costs(step, search, name, run.engine.run_state.cost_history())
        run.engine.train(name, run.data.search_batches(), search.job.steps, step, state, resume_at=position)


def finish_search(run: RunContext, search: Search) -> SearchResult:
    """Return the result of a search, the same on all processes, and fold the scores into the network."""
    search.finish()
    local_importance = {name: value.detach().double().cpu() for name, value in search.importance().items()}
    importance, notes, kernels = broadcast_object((local_importance, search.notes(), search.smaller_kernels()))
    fold_(run.compact)
    broadcast_module_(run.compact)
    run.compact.eval()
    for p in run.compact.parameters():
        p.grad = None
    if run.recipe.compensate == "least_squares" and run.recipe.search.leaves_choice_to_repair:
        importance, more_notes = prefer_predictors_for_repair(run, search.job.groups, importance)
        notes = [*notes, *more_notes]
    return SearchResult(importance, notes, kernels)
