"""prune, preview and load: one line per stage."""

from __future__ import annotations

import copy
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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from .branches import survives
from .budget import Bounds, BudgetError, choose, percent, smallest
from .checkpoint import Store
from .deploy import check_export, try_export
from .digest import digest
from .discover import find_groups
from .engine import pick_device
from .files import EXPORTED, KEPT, whole_directory, write_whole
from .groups import Groups
from .lock import LOCK
from .page import page
from .plan import Plan, PlanError
from .preflight import NotReady, check_groups, unwrapped
from .processes import agreed, first, rank
from .recipe import Recipe
from .report import Report
from .run import Run
from .search import importance as found_without_data
from .shell import still_
from .slicing import slice_
from .task import Task
from .timing import choose_by_latency
from .workdir import IDENTITY, check_workdir, other_export

RecipeLike = str | Path | Mapping[str, Any] | Recipe


@dataclass
class Pruned:
    """A compact model, the plan that made it, and the report about it."""

    model: nn.Module
    plan: Plan
    report: Report

    def __repr__(self) -> str:
        return f"Pruned({type(self.model).__name__}, {self.plan},\n       {self.report})"

    def save(self, directory: str | Path) -> None:
        """Write plan.json, model.safetensors, report.json and report.html; the directory appears whole or not at all.

        Raises:
            FileExistsError: the directory holds files of something else.
        """
        with whole_directory(Path(directory)) as folder:
            self._write(folder)
            for name in (IDENTITY, *KEPT, *(EXPORTED if self.report.export else ())):  # a working directory stays one
                held = Path(directory) / name
                if held.is_dir():
                    shutil.copytree(held, folder / name)
                elif held.exists():
                    (folder / name).write_bytes(held.read_bytes())

    def _write(self, folder: Path) -> None:
        """Every file whole; the report last: where it is, all is."""
        self.plan.save(folder / "plan.json")
        stored = _stored(self.model)
        hashes = f"{self.plan.digest()} {digest(stored)}"  # by which a foreign plan or a damaged file is noticed
        write_whole(folder / "model.safetensors", save(stored, {"hashes": hashes}))  # one entry: they are in no order
        write_whole(folder / "report.html", page(self.report).encode())
        write_whole(folder / "report.json", self.report.to_json().encode())


def prune(
    model: nn.Module,
    recipe: RecipeLike,
    *,
    train: Iterable[Any] | None = None,
    val: Iterable[Any] | None = None,
    task: Task | None = None,
    example_inputs: Any = None,
    workdir: str | Path | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    quiet: bool = False,
) -> Pruned:
    """Make a copy of `model` smaller as the recipe says; `model` itself is not changed, and is the teacher.

    `train` and `val` are loaders of (input, target); anything but classification brings a `task`. Example inputs are
    the first training batch if not given. With a `workdir` the result is saved there, and a run that was stopped goes
    on with `resume`.

    Raises:
        RecipeError: the recipe is wrong.
        NotReady: something that the recipe needs is missing or does not fit; all of it is named.
        TraceError: the model does not run on the example inputs.
        BudgetError: the budget is out of reach.
        Diverged: a loss is not finite.
        ExportError: the model cannot be exported as the recipe says; or the result cannot, and is in the workdir.
        FileExistsError: the workdir is in use, or belongs to another run.
    """
    recipe, folder, model = Recipe.load(recipe), None if workdir is None else Path(workdir), unwrapped(model)
    if resume and folder is None:
        raise NotReady("resume: there is no workdir to go on from; give workdir=FOLDER")
    check_export(recipe, folder)
    if folder is not None and resume and (done := _finished(model, recipe, folder, device)) is not None:
        return done
    given = {"train": train, "val": val, "task": task, "example_inputs": example_inputs}
    with Run.start(model, recipe, device, folder, resume, quiet, **given) as run:
        first(lambda: try_export(run.teacher, recipe, run.task, run.ready.example_inputs, run.engine.display))
        while run.round < recipe.steps:
            groups = run.find()
            run.evaluate_dense()
            importance = run.search(groups)  # attach scores, train, fold
            keep = run.choose(groups, importance)
            run.cut(groups, keep)
        run.finetune()
        pruned = Pruned(run.compact, run.plan, run.measure())
        if folder is not None and not rank():
            if hasattr(run.task, "save"):
                run.task.save(folder)
            pruned._write(folder)
            if recipe.export is not None:
                run.export(folder)  # what was pruned is safe if it fails
                pruned._write(folder)
            Store(folder).clear()
    agreed(None)  # nobody goes on before the files are there, and the lock is gone
    return pruned


def load(model: nn.Module, directory: str | Path) -> nn.Module:
    """Cut a fresh dense model to the saved shape, in place, and give it the saved weights. Runs no code from disk.

    Raises:
        NotReady: `model` is not a model, or is in a wrapper that holds on to its parameters.
        PlanError: the directory is damaged or was saved from another model; nothing was changed.
        FileNotFoundError: nothing was saved there.
    """
    folder, given, model = Path(directory), model, unwrapped(model)
    if isinstance(given, nn.parallel.DistributedDataParallel):
        raise NotReady("model: DistributedDataParallel holds on to the dense parameters; load first, then wrap")
    for name in ("plan.json", "model.safetensors"):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder}: expected a directory written by save(); it has no {name}")
    plan = Plan.load(folder / "plan.json")
    stored = _checked_weights(model, plan, folder / "model.safetensors")
    slice_(model, plan, anew=stored)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in stored:
                tensor.copy_(stored[name])
    return given


@dataclass
class Preview:
    """What a recipe would do to a model: nothing was trained, nothing was cut."""

    groups: Groups
    report: Report
    reachable: bool
    smallest: float | None  # a latency is not known before it is measured
    message: str

    def __repr__(self) -> str:
        return f"Preview({'within' if self.reachable else 'out of'} reach, {self.report})"

    def to_json(self) -> str:
        """The report, and whether the budget can be met."""
        verdict = {"reachable": self.reachable, "smallest": self.smallest, "message": self.message}
        return json.dumps(verdict | json.loads(self.report.to_json()), indent=1)

    def show(self, console: Console | None = None) -> None:
        console = console or Console()
        console.print(self.report)
        console.print(self.message, style="green" if self.reachable else "red")


def preview(model: nn.Module, recipe: RecipeLike, *, example_inputs: Any) -> Preview:
    """Groups, widths, costs, and whether the budget can be met, without training.

    Widths are those of the recipe where its search needs no data; else they are shown as if all dimensions were worth
    the same, and the message says so. A budget of latency is measured: candidates are cut out and timed.

    Raises:
        RecipeError: the recipe is wrong.
        NotReady: `model` is not a model, or has none of what the recipe targets.
        TraceError: the model does not run on the example inputs.
    """
    recipe, model = Recipe.load(recipe), unwrapped(model)
    groups = find_groups(model, example_inputs, recipe.target)
    check_groups(groups, recipe.target)
    budget, target = recipe.budget, recipe.target
    notes: list[str] = []
    timed = budget.unit == "latency"
    least = None if timed else smallest(groups, budget, target)
    known = recipe.search.length is None
    importance = (
        found_without_data(recipe.search, model, groups, recipe.seed)
        if known
        else {g.name: np.linspace(1, 0, g.width, endpoint=False) for g in groups}
    )
    ranking = recipe.search.ranks_by(groups, budget.unit) if known else "global"
    try:
        if timed:
            keep, notes = choose_by_latency(
                model, groups, importance, budget, target, recipe.timing, example_inputs, ranking=ranking
            )
        else:
            keep = choose(groups, importance, budget, target, ranking=ranking)
        message = f"budget.{budget.unit} {percent(budget.left)} can be met"
        if budget.auto:
            message = "budget: auto is learned in the search, and shown here as the dense network"
        message += f"; the smallest reachable is {percent(least)}" if least is not None else ", as measured here"
        message += "" if known or budget.auto else ". Widths are shown as if all dimensions were worth the same"
        report = Report.of(groups, keep)
        report.notes += notes
        return Preview(groups, report, True, least, message)
    except BudgetError as error:
        bounds = Bounds.of(groups, recipe.target)
        keep = {name: np.arange(k) for name, k in zip(groups.cost.names, bounds.least, strict=True)}
        return Preview(groups, Report.of(groups, keep), False, least, str(error))


def _finished(model: nn.Module, recipe: Recipe, folder: Path, device: str | torch.device | None) -> Pruned | None:
    """What a run that came to its end has left."""
    if not all((folder / name).exists() for name in (IDENTITY, "plan.json", "model.safetensors", "report.json")):
        return None
    check_workdir(folder, model, recipe, resume=True)
    report = Report.load(folder / "report.json")
    if recipe.export is not None and not report.export:
        return None  # all but the export is done
    if lines := other_export(report.recipe.get("export"), recipe):
        what = "the run is finished, and its recipe had another export"
        raise FileExistsError(f"{folder}: {what}; write another file with `compress export`:\n  " + "\n  ".join(lines))
    with suppress(OSError):  # it was stopped when all but this was done
        (folder / LOCK).unlink()
    compact = still_(load(copy.deepcopy(model), folder).to(pick_device(device, model)))
    return Pruned(compact, Plan.load(folder / "plan.json"), report)


def _stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state by name; tied tensors once, under their first name; memory formats are the loader's business."""
    state: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    memory: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            value = tensor.detach().contiguous()
            where = value.untyped_storage().data_ptr()
            state[name] = value.clone() if where in memory else value  # views of one another are stored apart
            memory.add(where)
        seen.add(id(tensor))
    return state


def _checked_weights(model: nn.Module, plan: Plan, path: Path) -> dict[str, torch.Tensor]:
    """The stored tensors, once they are known to fit what the plan makes of the model."""
    try:
        plan.check(model)
    except PlanError as error:
        raise PlanError(f"{path.with_name('plan.json')}: {error}") from None
    try:
        with safe_open(path, "pt") as file:
            hashes = (file.metadata() or {}).get("hashes", "").split()
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise PlanError(f"{path}: not a safetensors file, or a damaged one ({error})") from error
    if len(hashes) != 2:
        raise PlanError(f"{path}: expected the hashes of plan and weights that save() writes; got none. Save it again")
    if hashes[1] != digest(stored):
        raise PlanError(f"{path}: damaged: its weights are not those that were saved. Take a copy, or prune again")
    if hashes[0] != plan.digest():
        raise PlanError(f"{path}: was saved along with another plan than {path.with_name('plan.json')}")
    there = {name: tensor for name, tensor in _stored(model).items() if survives(name, plan.gone)}
    expected = {name: plan.shape_of(name, tensor.shape) for name, tensor in there.items()}
    expected |= {f"{module}.bias": (size,) for module, size in plan.biases.items()}
    wrong = [f"{name}: missing from the file" for name in expected if name not in stored]
    wrong += [f"{name}: not in the model" for name in stored if name not in expected]
    wrong += [
        f"{name}: the file has shape {list(stored[name].shape)}, the model would have {list(shape)}"
        for name, shape in expected.items()
        if name in stored and tuple(stored[name].shape) != tuple(shape)
    ]
    wrong += [
        f"{name}: the file has {stored[name].dtype}, the model {tensor.dtype}; convert the model before loading"
        for name, tensor in _stored(model).items()
        if name in stored and stored[name].dtype != tensor.dtype
    ]
    if wrong:
        more = f"\n  ... and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise PlanError(f"{path} was saved from another model:\n  " + "\n  ".join(wrong[:8]) + more)
    return stored
