"""The operation stage: train the scores of candidates, choose operations within the budget, and cut the network."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compress.budget import OperationChoice, Operations, choose_operations, count_macs, smallest_operations
from compress.data import derive_seed, num_batches
from compress.distributed import broadcast_module_, broadcast_object, on_rank_zero
from compress.errors import BudgetError, NotReady, PlanError
from compress.graph import Groups
from compress.modules import (
    SearchSpace,
    as_call_inputs,
    choices_of,
    chosen_by_path,
    clone_tensors,
    module_mode,
    shared_copy,
    tensors_in,
    tie_shared_scores_,
)
from compress.recipe import Budget, Recipe, Timing
from compress.report import NetworkNumbers, OperationRow, Report
from compress.search import Job, Search, search_class
from compress.storage import TrainingState, seed_all
from compress.surgery import Plan, slice_
from compress.training import set_memory_format_

from .context import RunContext
from .search_stage import train_search

STAGE: Literal["operations"] = "operations"


def find_operations(model: nn.Module, example_inputs: Any, timing: Timing) -> Operations:
    """Return the choices of a network.

    Raises:
        NotReady: the network has no choices, or they cannot be searched.
    """
    choices = choices_of(model)
    if not choices:
        raise NotReady(
            "target.operations: the model has no choices. Put compress.Choice(conv3=..., conv5=...) where a search is "
            "to choose, or use compress.cells.darts_network"
        )
    if "" in choices:
        raise NotReady("model: a Choice cannot be the whole model; wrap it: nn.Sequential(choice)")
    for path in choices:
        outer = next((other for other in choices if path.startswith(f"{other}.candidates.")), None)
        if outer is not None:
            raise NotReady(
                f"target.operations: {path} is a Choice inside a candidate of {outer}; put them side by side"
            )
    try:
        tie_shared_scores_(model)
    except ValueError as error:
        raise NotReady(str(error)) from error
    return Operations(model, example_inputs, timing)


def start_operation_search(run: RunContext, operations: Operations, steps: int | None = None) -> Search:
    """Return the recipe's search over the candidates of a network's choices."""
    recipe = run.recipe
    seed_all(derive_seed(recipe.seed, STAGE))
    job = Job(
        run.compact,
        Groups.empty(),
        run.task,
        steps if steps is not None else run.data.search_steps,
        recipe.seed,
        teacher=run.teacher,
        gradient_computer=run.engine.gradient_computer,
        operations=operations,
    )
    if run.data.train is not None:
        job.steps_per_epoch = num_batches(run.data.search_batches())
    return search_class(recipe.search.method, operations=True)(recipe.search, job)


class OperationSearch:
    """The search over operations in the user's own loop: train `search`, then `finish_` cuts the network."""

    def __init__(self, run: RunContext, steps: int) -> None:
        self.run = run
        self.operations = find_operations(run.compact, run.example_inputs, run.recipe.timing)
        self.search = start_operation_search(run, self.operations, steps)

    def finish_(self) -> None:
        """Choose the operations and cut the network.

        Raises:
            BudgetError: the budget cannot be met.
        """
        strengths = finish_operation_search(self.run, self.search)
        cut_operations_(self.run, self.operations, strengths, self.search.notes())


def choose_operations_(run: RunContext) -> None:
    """Search, choose and cut the operations of a run's network, unless an earlier process did and saved the result.

    Raises:
        NotReady: the network has no choices, or they cannot be searched.
        BudgetError: the budget cannot be met.
        Diverged: the loss is not finite.
        PlanError: the network with the chosen operations computes something else than the mixture with their scores.
    """
    if run.plan.choices:
        return
    operations = find_operations(run.compact, run.example_inputs, run.recipe.timing)
    with run.engine.stage("search"):
        search = start_operation_search(run, operations)
        if run.recipe.search.length is not None:
            train_search(run, search, STAGE)
        strengths = finish_operation_search(run, search)
    cut_operations_(run, operations, strengths, search.notes())


def finish_operation_search(run: RunContext, search: Search) -> dict[str, Tensor]:
    """Return the strength of every candidate, the same on all processes; the choices are as before the search."""
    importance = {name: value.detach().double().cpu() for name, value in search.importance().items()}
    strengths: dict[str, Tensor] = broadcast_object(importance)
    for choice in choices_of(run.compact).values():
        choice.remove_switch_()
        choice.remove_offsets_()
    broadcast_module_(run.compact)
    run.compact.eval()
    for p in run.compact.parameters():
        p.grad = None
    return strengths


def cut_operations_(run: RunContext, operations: Operations, strengths: dict[str, Tensor], notes: list[str]) -> None:
    """Choose the operations by their strengths and the budget, cut the network, and save a checkpoint.

    Raises:
        BudgetError: the budget cannot be met.
        PlanError: the cut is not exact.
    """
    recipe, engine = run.recipe, run.engine
    named = {
        group: dict(zip(names, strengths[group].tolist(), strict=True))
        for group, names in operations.candidates.items()
    }
    budget = recipe.budget if not recipe.target.widths else Budget(auto=True)  # the widths meet it
    with engine.stage("choose"), engine.display.bar("choosing operations"):
        choice = choose_operations(operations, named, budget)
        paths = chosen_by_path(run.compact, choice.chosen)
        on_rank_zero(lambda: verify_operations(run.compact, paths, run.example_inputs))
    run.report = operation_report(run.dense, operations, choice, named)
    run.report.notes += notes
    with engine.stage("slice"):
        plan = Plan({}, {}, choices=paths)
        slice_(run.compact, plan)
        set_memory_format_(run.compact, engine)
        run.plan = run.plan.then(plan)
    run.resume_point = None
    state = engine.run_state
    state.stage, state.round = "cut", run.round_index
    state.plan, state.report = run.plan.to_dict(), asdict(run.report)
    engine.save(TrainingState({"student": run.compact}))


@torch.no_grad()
def verify_operations(model: nn.Module, chosen: dict[str, str], example_inputs: Any) -> None:
    """Check that the network with the chosen candidates computes what the mixture does with all weight on them.

    Raises:
        PlanError: the outputs differ.
    """
    mixture = shared_copy(model)
    for path, choice in choices_of(mixture).items():
        scores = torch.full_like(choice.scores, -torch.inf)
        scores[choice.names.index(chosen[path])] = 0
        choice.scores = nn.Parameter(scores)
    network = slice_(shared_copy(model), Plan({}, {}, choices=chosen))
    expected, actual, again = (_eval_outputs(candidate, example_inputs) for candidate in (mixture, network, network))
    if _are_equal(actual, again) and not _are_equal(expected, actual):  # random outputs cannot be compared
        raise PlanError(
            "the network with the chosen operations computes something else than the mixture with all weight on them: "
            "look for code that uses a Choice in another way than calling it"
        )


def _eval_outputs(model: nn.Module, example_inputs: Any) -> list[Tensor]:
    args, kwargs = clone_tensors(as_call_inputs(example_inputs))
    with module_mode(model, training=False):
        return tensors_in(model(*args, **kwargs))


def _are_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(left, right, strict=True)
    )


def operation_report(
    dense: nn.Module, operations: Operations, choice: OperationChoice, strengths: dict[str, dict[str, float]]
) -> Report:
    """Return the report of a choice of operations, without measurements."""
    macs, params = broadcast_object((operations.costs("macs"), operations.costs("params")))
    rows = [
        OperationRow(
            name=group,
            places=len(copies),
            chosen=choice.chosen[group],
            strengths=strengths[group],
            macs={name: int(value) for name, value in macs[group].items()},
            params={name: int(value) for name, value in params[group].items()},
        )
        for group, copies in operations.groups.items()
    ]
    dense_numbers = _numbers(dense, operations.example_inputs)
    chosen_numbers = _numbers(operations.network(choice.chosen), operations.example_inputs)
    report = Report(dense_numbers, chosen_numbers, [], [], list(choice.notes), operations=rows)
    if isinstance(operations.model, SearchSpace):
        report.genotype = operations.model.genotype_of(choice.chosen)
    return report


def _numbers(model: nn.Module, example_inputs: Any) -> NetworkNumbers:
    macs = on_rank_zero(lambda: count_macs(model, example_inputs)[id(model)])
    return NetworkNumbers(sum(p.numel() for p in model.parameters()), macs)


def preview_operations(
    model: nn.Module, recipe: Recipe, example_inputs: Any
) -> tuple[Report, bool, dict[str, float], str]:
    """Return the report of the costliest operations, whether the budget can be met, the smallest, and a message.

    Raises:
        NotReady: the network has no choices, or they cannot be searched.
    """
    operations = find_operations(shared_copy(model), example_inputs, recipe.timing)
    equal = {group: dict.fromkeys(names, 1 / len(names)) for group, names in operations.candidates.items()}
    costliest = OperationChoice(operations.costliest("macs"), {}, [])
    report = operation_report(model, operations, costliest, equal)
    message = "the search chooses the operations; here the costliest are shown"
    budget = recipe.budget
    if recipe.target.widths:
        return report, True, {}, f"{message}. The budget is that of the widths of the network that they leave"
    if budget.auto:
        return report, True, {}, f"{message}. There is no budget"
    smallest = smallest_operations(operations, equal, budget)
    try:
        choose_operations(operations, equal, budget)
    except BudgetError as error:
        return report, False, smallest, str(error)
    return report, True, smallest, f"budget: {budget} can be met; {message}"
