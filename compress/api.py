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
    check_asks_for_less,
    choose_by_latency,
    choose_widths,
    dense_costs,
    smallest_fractions,
)
from compress.cells import Genotype
from compress.distributed import is_restarted, rank, wait_for_all
from compress.errors import BudgetError, NotReady
from compress.formatting import format_percent, printable
from compress.graph import Groups, Index
from compress.modules import is_hugging_face_model, set_eval_flags_, trainable_copy, unwrap_model, unwrap_teacher
from compress.pipeline import (
    IDENTITY_FILE,
    Run,
    RunIdentity,
    SharedSearch,
    UserInputs,
    add_agreement_,
    check_export,
    check_groups,
    check_workdir,
    choose_exact_plan,
    choose_operations_,
    export_differences,
    note_tight_limit,
    preview_operations,
    start_from_scratch_,
)
from compress.recipe import Budget, Quantity, Recipe
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

RecipeLike = str | float | Path | Mapping[str, Any] | Recipe


@dataclass
class Pruned:
    """Result of a pruning run: the compact model, its plan and the report."""

    model: nn.Module
    plan: Plan
    report: Report

    @property
    def genotype(self) -> Genotype | None:
        """The genotype of a network of cells; None for any other network."""
        return None if self.report.genotype is None else Genotype.from_dict(self.report.genotype)

    def __repr__(self) -> str:
        return f"Pruned({type(self.model).__name__}, {self.plan},\n       {self.report})"

    def save(self, directory: str | Path) -> None:
        """Write plan.json, model.safetensors, report.json and report.html; the directory is replaced atomically.

        For a Hugging Face model also config.json, so that `compress.hf.load` needs the directory alone.
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
        if is_hugging_face_model(self.model):
            from compress.hf import write_config

            write_config(self.model, self.plan, folder)
        write_atomic(folder / "report.html", render_page(self.report).encode())
        write_atomic(folder / "report.json", self.report.to_json().encode())


def prune(
    model: nn.Module,
    recipe: RecipeLike,
    *,
    train: Iterable[Any] | None = None,
    val: Iterable[Any] | None = None,
    test: Iterable[Any] | None = None,
    task: TaskLike | None = None,
    example_inputs: Any = None,
    teacher: nn.Module | None = None,
    calibration: Any = None,
    workdir: str | Path | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    quiet: bool = False,
) -> Pruned:
    """Prune a copy of a model as a recipe says, and fine-tune it; `model` is not changed.

    A recipe says which dimensions may be cut (`target`), how much of the network is left (`budget`), how the importance
    of a dimension is found (`search`) and how the small network is trained (`finetune`). Only the budget is required.
    A budget alone, such as "50%" of the MACs, leaves the rest to the data: with labels, a search and fine-tuning with
    the dense network as teacher; with inputs alone, repair and distillation; without data, a cut by magnitude.
    Otherwise it is the name of a packaged recipe (`compress recipes` lists them), the path of a YAML file, or a dict:

    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 6 * 6, 10))
    >>> train = val = [(torch.randn(8, 3, 8, 8), torch.randint(10, (8,))) for _ in range(4)]
    >>> recipe = {
    ...     "budget": {"macs": "50%"},  # of the dense network's; also params, latency, dims
    ...     "search": {"method": "netslim", "epochs": 1},
    ...     "finetune": {"epochs": "10 steps", "distill": {}},  # the dense network is the teacher
    ... }
    >>> pruned = prune(model, recipe, train=train, val=val, quiet=True)
    >>> pruned.model[0]  # a plain module with fewer channels
    Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
    >>> pruned.save("out")  # doctest: +SKIP

    `pruned.model` is the network, `pruned.report` what it lost and won. Every key of a recipe is in docs/recipe.md.

    Args:
        model: the trained dense model.
        recipe: budget such as "50%", name of a packaged recipe, path of a YAML file, dict or `Recipe`.
        train: loader of (input, target) batches for search and fine-tuning, or of inputs alone; or a tensor of inputs.
        val: loader for evaluation; chooses the best weights of fine-tuning.
        test: loader that chooses nothing: dense and pruned network are evaluated on it once, at the end.
        task: loss, evaluation and data of anything other than classification; replaces `train` and `val`.
        example_inputs: arguments of the model; default: the inputs of the first training batch.
        teacher: network that search and fine-tuning distil from; default: `model` as it is.
        calibration: inputs without labels for `compensate`: a tensor, a list or a loader; default: the inputs of
            `train`.
        workdir: folder for the result and for checkpoints.
        resume: continue the run in `workdir`; processes that `torchrun` has restarted do so anyway.
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
    resume = resume or (folder is not None and is_restarted())
    teacher = None if teacher is None or teacher is model else unwrap_teacher(teacher)
    if resume and folder is None:
        raise NotReady("resume: there is no workdir to continue from; give workdir=FOLDER")
    check_export(recipe, folder)
    inputs = UserInputs(train, val, task, example_inputs, teacher, calibration, test)
    return run_pruning(model, recipe, inputs, folder, resume=resume, device=device, quiet=quiet)


def run_pruning(
    model: nn.Module,
    recipe: Recipe,
    inputs: UserInputs,
    folder: Path | None,
    *,
    resume: bool,
    device: str | torch.device | None,
    quiet: bool,
    shared: SharedSearch | None = None,
) -> Pruned:
    """Run all stages of a pruning whose arguments `prune` has checked.

    Args:
        shared: what this cut has in common with cuts to other budgets; default: find it here.

    Raises:
        The same as `prune`.
    """
    if (
        folder is not None
        and resume
        and (finished := _load_finished(model, recipe, inputs, folder, device)) is not None
    ):
        return finished
    options: dict[str, Any] = {"device": device, "workdir": folder, "resume": resume, "quiet": quiet}
    with Run.start(model, recipe, inputs, **options, announces=shared is None) as run:
        run.try_export()
        if recipe.target.operations:
            run.evaluate_dense()
            choose_operations_(run)
        while recipe.target.widths and run.round_index < recipe.steps:
            result = None
            if shared is not None and run.round_index == 0:
                groups, result = shared.apply_(run), shared.result
                run.check_budget(groups)
            else:
                groups = run.find_groups()
            run.evaluate_dense()
            result = result or run.search(groups)
            plan = run.choose_plan(groups, result)
            run.cut_(groups, plan, result)
        run.evaluate_sliced()
        start_from_scratch_(run)
        run.finetune()
        pruned = Pruned(run.compact, run.plan, run.measure())
        if shared is not None:
            add_agreement_(run)
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
    smallest: dict[str, float]  # smallest fraction of each computed cost of the budget that can be met
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
    if recipe.target.operations:
        return Preview(Groups.empty(), *preview_operations(model, recipe, example_inputs))
    groups = find_groups(model, example_inputs, recipe.target)
    check_groups(groups, recipe.target)
    budget, target = recipe.budget, recipe.target
    smallest = smallest_fractions(groups, budget, target)
    measurement = LatencyMeasurement(example_inputs, recipe.timing)
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
        keep, notes[:] = choose_by_latency(model, groups, importance, budget, target, measurement, ranking=ranking)
        return keep

    try:
        costs = dense_costs(groups, budget)
        if isinstance(budget.latency, Quantity):
            costs["latency"] = measurement.milliseconds(model)
        check_asks_for_less(budget, costs)
        _, keep, refusals = choose_exact_plan(model, groups, choose)
    except BudgetError as error:
        narrowest = WidthBounds.of(groups, target).least
        keep = {name: np.arange(width) for name, width in zip(groups.cost.names, narrowest, strict=True)}
        return Preview(groups, Report.of(groups, keep), False, smallest, str(error))
    report = Report.of(groups, keep)
    report.notes += [*notes, *refusals]
    note_tight_limit(report, budget, costs)
    return Preview(groups, report, True, smallest, _reachable_message(budget, smallest, needs_data))


def _reachable_message(budget: Budget, smallest: Mapping[str, float], needs_data: bool) -> str:
    least = ", ".join(
        f"{unit} {format_percent(f)}" if len(smallest) > 1 else format_percent(f) for unit, f in smallest.items()
    )
    message = f"budget: {budget} can be met"
    if budget.auto:
        message = "budget: auto is learned in the search; the dense network is shown"
    message += f"; the smallest reachable is {least}" * bool(smallest) + ", as measured here" * budget.is_measured
    if needs_data and not budget.auto:
        message += ". The search chooses the widths; here every group keeps about the same fraction of its dimensions"
    return message


def _load_finished(
    model: nn.Module, recipe: Recipe, inputs: UserInputs, folder: Path, device: str | torch.device | None
) -> Pruned | None:
    """Load the result of a run that is already finished; None if it is not.

    Raises:
        FileExistsError: the folder belongs to another run, its recipe had another export, or it had no test data.
    """
    if not all((folder / name).exists() for name in (IDENTITY_FILE, "plan.json", "model.safetensors", "report.json")):
        return None
    check_workdir(folder, RunIdentity.of(model, recipe, inputs.teacher), resume=True)
    report = Report.load(folder / "report.json")
    if recipe.export is not None and not report.export:
        return None  # only the export is missing
    if differences := export_differences(report.recipe.get("export"), recipe):
        raise FileExistsError(
            f"{folder}: the run is finished, and its recipe had another export; write another file with `compress "
            "export`:\n  " + "\n  ".join(differences)
        )
    if inputs.test is not None and not report.pruned.test:
        raise FileExistsError(
            f"{folder}: the run is finished, and it had no test data; leave test out, and evaluate pruned.model on them"
        )
    with suppress(OSError), lock_directory(folder):  # the run may have been stopped just before it did this
        CheckpointStore(folder).delete()
        remove_temporary_files(folder)
    compact = set_eval_flags_(load(trainable_copy(model), folder).to(pick_device(device, model)))
    return Pruned(compact, Plan.load(folder / "plan.json"), report)
