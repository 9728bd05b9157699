"""The function `compress.sensitivity`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.budget import dense_costs
from compress.data import (
    loader_problems,
    peek_first_batch,
    shard_loader,
    shuffled_loader,
)
from compress.distributed import sum_numbers
from compress.errors import BatchError, NotReady, format_error
from compress.graph import Group, included_modules
from compress.modules import shared_copy, unwrap_model
from compress.pipeline import Run, UserInputs
from compress.progress import ProgressBar
from compress.recipe import Recipe, Target, parse_fraction
from compress.search import search_class
from compress.surgery import Plan, repair_, slice_
from compress.training import Classification, Task, TaskLike, as_batches, as_task

from .group_sensitivity import GroupSensitivity, NarrowedWidth, Sensitivity
from .measurement import FixedBatches, Measurement, read_batches
from .narrowing import Narrowing, zeroed

DEFAULT_WIDTHS = ("75%", "50%", "25%")
REPAIR_IMAGES = 512  # read behind the measured batches, if the user gives no calibration


def sensitivity(
    model: nn.Module,
    data: Any = None,
    *,
    widths: Sequence[float | str] = DEFAULT_WIDTHS,
    batches: int = 8,
    target: Target | Mapping[str, Any] | str = "auto",
    search: str | Mapping[str, Any] = "magnitude",
    repair: bool = True,
    calibration: Any = None,
    task: TaskLike | None = None,
    example_inputs: Any = None,
    device: str | torch.device | None = None,
    quiet: bool = False,
) -> Sensitivity:
    """Measure the loss and the metric of a model as each group alone is narrowed, the most fragile group first.

    Nothing is trained. Right after a cut the model is measured with the dropped dimensions set to zero, which gives
    what the sliced network computes. For repair the model is sliced, and the layers behind the cut are solved as with
    `compensate: least_squares`. The groups are found once, and all points are measured on the same batches.

    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 6 * 6, 10))
    >>> val = [(torch.randn(8, 3, 8, 8), torch.randint(10, (8,))) for _ in range(4)]
    >>> sensitivities = sensitivity(model, val, widths=["50%", "25%"], quiet=True)
    >>> [(group.name, [point.width for point in group.points]) for group in sensitivities]
    [('0', [8, 4])]

    Args:
        model: the dense model; it is not changed.
        data: loader of (input, target) batches or of inputs alone, or a tensor of inputs; with a task, of whatever it
            takes; default: the task's `val`, or else its `train`. A DataLoader in order is shuffled.
        widths: fractions of each group's width; each group gets the next allowed widths (`target.round_to`).
        batches: how many batches each point is measured on.
        target: section `target` of a recipe; its bounds are ignored.
        search: section `search` of a recipe; one that does not train the model.
        repair: measure each point again after repair by least squares.
        calibration: inputs for repair, of a loader the first 512; default: up to 512 images of `data` behind those that
            are measured.
        task: loss and evaluation of anything other than classification.
        example_inputs: arguments of the model; default: the inputs of the first batch.
        device: default: a GPU if there is one.
        quiet: show no progress.

    Raises:
        RecipeError: `target` or `search` is invalid.
        NotReady: something is missing or does not fit; the message lists all problems.
        BatchError: a batch is not what the task expects.
        TraceError: the model does not run on the example inputs.
    """
    model, target = unwrap_model(model), target.model_dump() if isinstance(target, Target) else target
    recipe = Recipe.load({"target": target, "search": search, "budget": "50%"})  # no network is cut to the budget
    data, task = _choose_data(data, task)
    fractions = _check_arguments(widths, batches, data, recipe)
    update: dict[str, Any] = {"target": recipe.target.model_copy(update={"bounds": {}, "branches": False})}
    update |= {"compensate": "least_squares" if repair else "mean"}  # tells the run that something reads the data
    recipe = recipe.model_copy(update=update)
    peek_first_batch(data, "data")
    train = data if task is None else None
    inputs = UserInputs(train, None, task, example_inputs, calibration=calibration if repair else None)
    with Run.start(model, recipe, inputs, device=device, workdir=None, resume=False, quiet=quiet) as run:
        return _Sensitivity(run, fractions, batches, repair).measure()


class _Sensitivity:
    """A measurement in progress."""

    def __init__(self, run: Run, fractions: Sequence[float], batches: int, repair: bool) -> None:
        self.run, self.fractions, self.repair, self.notes = run, fractions, repair, list[str]()
        given = run.calibration.given
        images = REPAIR_IMAGES if repair and given is None else 0
        loader, seed = run.data.train, run.recipe.seed
        assert loader is not None
        if isinstance(run.task, Classification):
            loader = shard_loader(loader, even_batches=False)
        measured, others = read_batches(loader, seed, batches, images)
        self.fixed = FixedBatches(measured, run.task, run.engine)
        self.calibration: list[Any] = []
        if repair:
            if given is None and not others:
                self.notes.append("repaired on the measured batches themselves: give calibration=INPUTS, or more data")
            if given is not None and not isinstance(given, Tensor):
                given = read_batches(given, seed, 0, REPAIR_IMAGES)[1]
            run.calibration = replace(run.calibration, train=others or measured, given=given)
            self.calibration = run.calibration.read()
        if not run.task.can_test:
            self.notes.append(f"{run.task.type_name} evaluates on its own data only: the loss alone is measured")

    def measure(self) -> Sensitivity:
        """Find and rank the groups, and measure the model with each of them narrowed."""
        run = self.run
        groups = run.find_groups(check_budget=False)
        if not len(groups):
            raise NotReady(f"target: there is nothing to narrow. {groups.describe_refusals()}".rstrip())
        run.engine.run_state.dense_costs = dense_costs(groups, run.recipe.budget)
        narrowing = Narrowing(run.compact, groups, run.search(groups).importance, run.recipe.target)
        dense = self._measure_dense()
        widths = {group.name: narrowing.widths(group, self.fractions) for group in groups}
        if whole := [name for name, narrower in widths.items() if not narrower]:
            self.notes.append(f"no narrower width is allowed: {', '.join(whole)}")
        total = sum(map(len, widths.values())) * (2 if self.repair else 1)
        measured: list[GroupSensitivity] = []
        with run.engine.stage("sensitivity"), run.engine.display.bar("sensitivity", total) as bar:
            for group in groups:
                points = [self._point(narrowing, group, width, bar) for width in widths[group.name]]
                if points:
                    measured.append(GroupSensitivity(group.name, group.kind_and_part, group.width, points))
        if not measured:
            raise NotReady("target.min_keep, round_to: no group may be narrowed; lower them")
        return Sensitivity(
            dense,
            measured,
            tuple(self.fractions),
            run.recipe.search.method,
            int(sum_numbers([len(self.fixed.batches)])[0]),
            type(run.model).__name__,
            self.notes,
        )

    def _measure_dense(self) -> Measurement:
        """Measure the dense network, which shows whether the data fit.

        Raises:
            NotReady: the batches cannot be evaluated.
            BatchError: a batch is not what the task expects.
        """
        try:
            return self.fixed.measure(self.run.compact)
        except BatchError:
            raise
        except Exception as error:  # of any type: the user's own code fails
            raise NotReady(f"data: the batches cannot be evaluated: {format_error(error)}") from error

    def _point(self, narrowing: Narrowing, group: Group, width: int, bar: ProgressBar) -> NarrowedWidth:
        model, plan = self.run.compact, narrowing.plan(group, width)
        with zeroed(model, plan):
            cut = self.fixed.measure(model)
        bar.advance(group.name)
        repaired = None
        if self.repair:
            repaired = self._measure_repaired(group, plan) if plan.slices else cut
            bar.advance(group.name)
        return NarrowedWidth(width, narrowing.macs_left(group, width), cut, repaired)

    def _measure_repaired(self, group: Group, plan: Plan) -> Measurement | None:
        """Slice a copy, solve its layers and measure it; None if the sliced network does not run at this width."""
        run = self.run
        before_cut = run.compact
        sliced = slice_(shared_copy(before_cut), plan)
        within = included_modules(before_cut, run.recipe.target)
        try:
            repair_(sliced, before_cut, plan, self.calibration, run.calibration.forward, within=within)
            return self.fixed.measure(sliced)
        except Exception as error:  # from the model's own code, which ran before the cut
            width = len(plan.keep[group.name])
            self.notes.append(f"{group.name} of {width}: the sliced network does not run: {format_error(error)}")
            return None


def _choose_data(data: Any, task: TaskLike | None) -> tuple[Any, Task | None]:
    """Return the data, and a copy of the task whose training data they are.

    Raises:
        NotReady: there are no data, or they can be read only once.
        TypeError: the task lacks a method.
    """
    checked = None if task is None else copy.copy(as_task(task))
    if data is None and checked is not None:
        data = checked.val if checked.val is not None else checked.train
    if data is None:
        raise NotReady("data: expected a loader of batches; got none. Give data=LOADER, or a task with val or train")
    if isinstance(data, Iterator):
        raise NotReady("data: expected a loader that can be read more than once; got an iterator. Give list(data)")
    data = shuffled_loader(as_batches(data))
    if checked is not None:
        checked.train, checked.val = data, None
    return data, checked


def _check_arguments(widths: Sequence[float | str], batches: int, data: Any, recipe: Recipe) -> list[float]:
    """Return the widths as fractions, from wide to narrow, each once.

    Raises:
        NotReady: an argument is invalid; the message lists all problems.
    """
    problems = loader_problems(data, "data")
    width_list = list(widths) if isinstance(widths, (list, tuple)) else [widths]
    fractions = [parse_fraction(width) for width in width_list]
    if not fractions or not all(fraction is not None and 0 < fraction <= 1 for fraction in fractions):
        wrong = [w for w, f in zip(width_list, fractions, strict=True) if f is None or not 0 < f <= 1]
        got = ", ".join(map(repr, wrong)) or "none"
        problems.append(f'widths: expected fractions of a width, as 0 < x <= 1 or "50%"; got {got}')
    if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
        problems.append(f"batches: expected the number of batches to measure on, 1 or more; got {batches!r}")
    method = recipe.search.method
    if recipe.search.length is not None and search_class(method).trains:
        problems.append(
            f"search: {method} changes the network, which is measured as it is. Give magnitude, taylor or random"
        )
    if recipe.target.operations:
        problems.append("target.operations: operations have no widths; choose them first, and measure the result")
    if problems:
        raise NotReady("\n  ".join(problems))
    return sorted({fraction for fraction in fractions if fraction is not None}, reverse=True)
