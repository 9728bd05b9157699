"""prune, preview and load: one line per stage."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from . import search
from .budget import Bounds, BudgetError, choose, percent, smallest
from .compensate import compensate_
from .discover import find_groups
from .files import whole_directory
from .groups import Groups
from .plan import Plan, PlanError
from .recipe import Recipe
from .report import Report
from .slicing import slice_

RecipeLike = str | Path | Mapping[str, Any] | Recipe


@dataclass
class Pruned:
    """A compact model, the plan that made it, and the report about it."""

    model: nn.Module
    plan: Plan
    report: Report

    def save(self, directory: str | Path) -> None:
        """Write plan.json, model.safetensors and report.json; the directory appears whole or not at all.

        Raises:
            FileExistsError: the directory holds files of something else.
        """
        with whole_directory(Path(directory)) as folder:
            self.plan.save(folder / "plan.json")
            save_file(_stored(self.model), folder / "model.safetensors")
            (folder / "report.json").write_text(self.report.to_json())


def prune(model: nn.Module, recipe: RecipeLike, *, example_inputs: Any) -> Pruned:
    """Cut a copy of `model` as the recipe says; `model` itself is not changed.

    Raises:
        RecipeError: the recipe is wrong.
        TraceError: the model does not run on the example inputs.
        BudgetError: the budget is out of reach.
    """
    recipe = Recipe.load(recipe)
    groups = find_groups(model, example_inputs, recipe.target)
    importance = search.importance(recipe.search.method, model, groups, recipe.search.seed)
    keep = choose(groups, importance, recipe.budget, recipe.target)
    plan = Plan.build(model, groups, keep)
    compact = copy.deepcopy(model)
    report = Report.of(groups, keep)
    if recipe.compensate:
        done = compensate_(compact, groups, plan, [example_inputs])
        report.notes.append(f"the means of dropped dimensions went into the biases of {len(done)} layers")
    slice_(compact, plan)
    report.pruned.params = sum(p.numel() for p in compact.parameters())  # biases that compensation made among them
    return Pruned(compact, plan, report)


def load(model: nn.Module, directory: str | Path) -> nn.Module:
    """Cut a fresh dense model to the saved shape, in place, and give it the saved weights. Runs no code from disk.

    Raises:
        PlanError: the directory was saved from another model.
        FileNotFoundError: nothing was saved there.
    """
    folder = Path(directory)
    for name in ("plan.json", "model.safetensors"):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder}: expected a directory written by save(); it has no {name}")
    plan = Plan.load(folder / "plan.json")
    stored = _checked_weights(model, plan, folder / "model.safetensors")
    slice_(model, plan)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in stored:
                tensor.copy_(stored[name])
    return model


@dataclass
class Preview:
    """What a recipe would do to a model: nothing was trained, nothing was cut."""

    groups: Groups
    report: Report
    reachable: bool
    smallest: float
    message: str

    def to_json(self) -> str:
        """The report, and whether the budget can be met."""
        verdict = {"reachable": self.reachable, "smallest": self.smallest, "message": self.message}
        return json.dumps(verdict | json.loads(self.report.to_json()), indent=1)

    def show(self, console: Console | None = None) -> None:
        console = console or Console()
        console.print(self.report)
        console.print(self.message, style="green" if self.reachable else "red")


def preview(model: nn.Module, recipe: RecipeLike, *, example_inputs: Any) -> Preview:
    """Groups, widths, costs, and whether the budget can be met, without training; widths are shown for equal scores.

    Raises:
        RecipeError: the recipe is wrong.
        TraceError: the model does not run on the example inputs.
    """
    recipe = Recipe.load(recipe)
    groups = find_groups(model, example_inputs, recipe.target)
    least = smallest(groups, recipe.budget, recipe.target)
    importance = {g.name: np.linspace(1, 0, g.width) for g in groups}
    try:
        keep = choose(groups, importance, recipe.budget, recipe.target)
        unit, left = recipe.budget.unit, percent(recipe.budget.left)
        message = f"budget.{unit} {left} can be met; the smallest reachable is {percent(least)}"
        return Preview(groups, Report.of(groups, keep), True, least, message)
    except BudgetError as error:
        bounds = Bounds.of(groups, recipe.target)
        keep = {name: np.arange(k) for name, k in zip(groups.cost.names, bounds.least, strict=True)}
        return Preview(groups, Report.of(groups, keep), False, least, str(error))


def _stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state by name; tied tensors once, under their first name; memory formats are the loader's business."""
    state: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            state[name] = tensor.detach().contiguous()
        seen.add(id(tensor))
    return state


def _checked_weights(model: nn.Module, plan: Plan, path: Path) -> dict[str, torch.Tensor]:
    """The stored tensors, once they are known to fit what the plan makes of the model."""
    plan.check(model)
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file ({error})") from error
    expected = {name: plan.shape_of(name, tensor.shape) for name, tensor in _stored(model).items()}
    expected |= {f"{module}.bias": (size,) for module, size in plan.biases.items()}
    wrong = [f"{name}: missing from the file" for name in expected if name not in stored]
    wrong += [f"{name}: not in the model" for name in stored if name not in expected]
    wrong += [
        f"{name}: the file has shape {list(stored[name].shape)}, the model would have {list(shape)}"
        for name, shape in expected.items()
        if name in stored and tuple(stored[name].shape) != tuple(shape)
    ]
    if wrong:
        more = f"\n  ... and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise PlanError(f"{path} was saved from another model:\n  " + "\n  ".join(wrong[:8]) + more)
    return stored
