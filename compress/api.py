"""The functions `compress.prune` and `compress.preview`, and their results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

from compress.budget import (
    Importance,
    LatencyMeasurement,
    WidthBounds,
    choose_by_latency,
    choose_widths,
    smallest_fraction,
)
from compress.distributed import rank, wait_for_all
from compress.errors import BudgetError, NotReady
from compress.formatting import format_percent, printable
from compress.graph import Groups, Index
from compress.modules import set_eval_flags_, trainable_copy, unwrap_model
from compress.pipeline import (
    IDENTITY_FILE,
    Run,
    RunIdentity,
    UserInputs,
    check_export,
    check_groups,
    check_workdir,
    choose_exact_plan,
    export_differences,
)
from compress.recipe import Budget, Recipe
from compress.report import Report, render_page
from compress.search import data_free_importance
from compress.storage import (
    EXPORT_FILES,
    PRESERVED,
    CheckpointStore,
    atomic_directory,
    lock_directory,
    remove_temporary_files,
    write_atomic,
)
from compress.surgery import Plan, find_groups, load, save_model
from compress.training import TaskLike, pick_device

RecipeLike = str | Path | Mapping[str, Any] | Recipe


@dataclass
class Pruned:
    """Result of a pruning run: the compact model, its plan and the report."""

    model: nn.Module
    plan: Plan
    report: Report

    def __repr__(self) -> str:
        return f"Pruned({type(self.model).__name__}, {self.plan},\n       {self.report})"

    def save(self, directory: str | Path) -> None:
        """Write plan.json, model.safetensors, report.json and report.html; the directory is replaced atomically.

        A working directory keeps its other files: run.json, trackers, an export.

        Raises:
            FileExistsError: the directory holds other files.
            OSError: a file cannot be written.
        """
        with atomic_directory(Path(directory)) as folder:
            self._write(folder)
            kept_names = [IDENTITY_FILE, *PRESERVED, *(EXPORT_FILES if self.report.export else ())]
            for name in kept_names:
                existing = Path(directory) / name
                if existing.is_dir():
                    shutil.copytree(existing, folder / name)
                elif existing.exists():
                    (folder / name).write_bytes(existing.read_bytes())

    def _write(self, folder: Path) -> None:
        """Write each file atomically; report.json comes last, so that it is there only if the others are."""
        save_model(self.model, self.plan, folder)
        write_atomic(folder / "report.html", render_page(self.report).encode())
        write_atomic(folder / "report.json", self.report.to_json().encode())


def prune(
    model: nn.Module,
    recipe: RecipeLike,
    *,
    train: Iterable[Any] | None = None,
    val: Iterable[Any] | None = None,
    task: TaskLike | None = None,
    example_inputs: Any = None,
    workdir: str | Path | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    quiet: bool = False,
) -> Pruned:
    """Prune a copy of a model as a recipe says, and fine-tune it; `model` is not changed and serves as the teacher.

    Args:
        model: the trained dense model.
        recipe: name of a packaged recipe, path of a YAML file, dict or `Recipe`.
        train: loader of (input, target) batches for search and fine-tuning.
        val: loader for evaluation.
        task: loss, evaluation and data of anything other than classification; replaces `train` and `val`.
        example_inputs: arguments of the model; default: the inputs of the first training batch.
        workdir: folder for the result and for checkpoints.
        resume: continue the run in `workdir`.
        device: default: a GPU if there is one.
        quiet: show no progress.

    Raises:
        RecipeError: the recipe is invalid.
        NotReady: something that the recipe needs is missing or does not fit; the message lists all problems.
        TraceError: the model does not run on the example inputs.
        BudgetError: the budget cannot be met.
        PlanError: the plan is not exact, and no group is at fault.
        DoesNotRun: a network cannot be timed, though its cut is exact on the example inputs.
        Diverged: a loss is not finite.
        ExportError: the model cannot be exported as the recipe says; the pruned network, if there is one already, is
            in the workdir.
        FileExistsError: the workdir is in use, or belongs to another run.
    """
    recipe, folder, model = Recipe.load(recipe), None if workdir is None else Path(workdir), unwrap_model(model)
    if resume and folder is None:
        raise NotReady("resume: there is no workdir to continue from; give workdir=FOLDER")
    check_export(recipe, folder)
    if folder is not None and resume and (finished := _load_finished(model, recipe, folder, device)) is not None:
        return finished
    inputs = UserInputs(train, val, task, example_inputs)
    with Run.start(model, recipe, inputs, device=device, workdir=folder, resume=resume, quiet=quiet) as run:
        run.try_export()
        while run.round_index < recipe.steps:
            groups = run.find_groups()
            run.evaluate_dense()
            result = run.search(groups)
            plan = run.choose_plan(groups, result)
            run.cut_(groups, plan, result)
        run.evaluate_sliced()
        run.finetune()
        pruned = Pruned(run.compact, run.plan, run.measure())
        if folder is not None and not rank():
            run.task.save(folder)
            pruned._write(folder)
            if recipe.export is not None:
                run.export(folder)  # if it fails, the pruned network is saved
                pruned._write(folder)
            CheckpointStore(folder).delete()
    wait_for_all()  # until the files are written and the lock is released
    return pruned


@dataclass
class Preview:
    """Expected result of a recipe on a model, without training."""

    groups: Groups
    report: Report
    reachable: bool
    smallest: float | None  # smallest budget that can be met; None for latency
    message: str

    def __repr__(self) -> str:
        return f"Preview({'within' if self.reachable else 'out of'} reach, {self.report})"

    def to_json(self) -> str:
        """Return the report and whether the budget can be met, as JSON."""
        verdict = {"reachable": self.reachable, "smallest": self.smallest, "message": self.message}
        return json.dumps(verdict | json.loads(self.report.to_json()), indent=1)

    def show(self, console: Console | None = None) -> None:
        """Print the report and the message."""
        console = console or Console()
        console.print(self.report)
        color = "green" if self.reachable else "red"
        console.print(printable(self.message), style=color, markup=False)


def preview(model: nn.Module, recipe: RecipeLike, *, example_inputs: Any) -> Preview:
    """Return groups, widths and costs that a recipe leads to, and whether its budget can be met, without training.

    If the search needs no data, the widths are those of the recipe. Otherwise the search will choose them; here every
    group keeps about the same fraction of its dimensions, and the message says so. For a latency budget, candidates are
    sliced and timed.

    Raises:
        RecipeError: the recipe is invalid.
        NotReady: `model` is not a model, or has no dimensions of the kinds that the recipe targets.
        TraceError: the model does not run on the example inputs.
        PlanError: the plan is not exact, and no group is at fault.
        DoesNotRun: a network cannot be timed, though its cut is exact on the example inputs.
    """
    recipe, model = Recipe.load(recipe), unwrap_model(model)
    groups = find_groups(model, example_inputs, recipe.target)
    check_groups(groups, recipe.target)
    budget, target = recipe.budget, recipe.target
    smallest = None if budget.is_measured else smallest_fraction(groups, budget, target)
    needs_data = recipe.search.length is not None
    importance: Importance
    if needs_data:
        importance = {group.name: np.linspace(1, 0, group.width, endpoint=False) for group in groups}
    else:
        importance = data_free_importance(recipe.search, model, groups, recipe.seed)
    ranking = "global" if needs_data else recipe.search.ranking_for(groups, budget.unit)
    notes: list[str] = []

    def choose() -> Mapping[str, Index]:
        if not budget.is_measured:
            return choose_widths(groups, importance, budget, target, ranking=ranking)
        measurement = LatencyMeasurement(example_inputs, recipe.timing)
        keep, notes[:] = choose_by_latency(model, groups, importance, budget, target, measurement, ranking=ranking)
        return keep

    try:
        _, keep, refusals = choose_exact_plan(model, groups, choose)
    except BudgetError as error:
        narrowest = WidthBounds.of(groups, target).least
        keep = {name: np.arange(width) for name, width in zip(groups.cost.names, narrowest, strict=True)}
        return Preview(groups, Report.of(groups, keep), False, smallest, str(error))
    report = Report.of(groups, keep)
    report.notes += [*notes, *refusals]
    return Preview(groups, report, True, smallest, _reachable_message(budget, smallest, needs_data))


def _reachable_message(budget: Budget, smallest: float | None, needs_data: bool) -> str:
    message = f"budget.{budget.unit} {format_percent(budget.left)} can be met"
    if budget.auto:
        message = "budget: auto is learned in the search; the dense network is shown"
    message += (
        f"; the smallest reachable is {format_percent(smallest)}" if smallest is not None else ", as measured here"
    )
    if needs_data and not budget.auto:
        message += ". The search chooses the widths; here every group keeps about the same fraction of its dimensions"
    return message


def _load_finished(model: nn.Module, recipe: Recipe, folder: Path, device: str | torch.device | None) -> Pruned | None:
    """Load the result of a run that is already finished; None if it is not.

    Raises:
        FileExistsError: the folder belongs to another run, or its recipe had another export.
    """
    if not all((folder / name).exists() for name in (IDENTITY_FILE, "plan.json", "model.safetensors", "report.json")):
        return None
    check_workdir(folder, RunIdentity.of(model, recipe), resume=True)
    report = Report.load(folder / "report.json")
    if recipe.export is not None and not report.export:
        return None  # only the export is missing
    if differences := export_differences(report.recipe.get("export"), recipe):
        raise FileExistsError(
            f"{folder}: the run is finished, and its recipe had another export; write another file with `compress "
            "export`:\n  " + "\n  ".join(differences)
        )
    with suppress(OSError), lock_directory(folder):  # the run may have been stopped just before it did this
        CheckpointStore(folder).delete()
        remove_temporary_files(folder)
    compact = set_eval_flags_(load(trainable_copy(model), folder).to(pick_device(device, model)))
    return Pruned(compact, Plan.load(folder / "plan.json"), report)
