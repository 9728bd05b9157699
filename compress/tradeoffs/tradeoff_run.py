"""The function `compress.tradeoff`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.api import RecipeLike, run_pruning
from compress.distributed import on_rank_zero, rank, wait_for_all
from compress.errors import NotReady, RecipeError
from compress.modules import unwrap_model, unwrap_teacher
from compress.pipeline import Run, SharedSearch, UserInputs, can_share_search
from compress.progress import ProgressDisplay
from compress.recipe import Budget, Recipe, read_budget
from compress.storage import CheckpointStore, is_temporary_file, remove_temporary_files, write_atomic
from compress.training import TaskLike

from .curve import NOT_MEASURED, Curve, Point
from .page import render_curve

DEFAULT_BUDGETS = ("90%", "80%", "70%", "60%", "50%", "40%", "30%")
SEARCH_FOLDER, JSON_FILE, PAGE_FILE = "search", "tradeoff.json", "tradeoff.html"
OWN_BUDGET = {"macs": "50%"}  # of a recipe that has none; no network is cut to it


def tradeoff(
    model: nn.Module,
    recipe: RecipeLike,
    budgets: Sequence[float | str | dict[str, Any] | Budget] = DEFAULT_BUDGETS,
    *,
    train: Iterable[Any] | None = None,
    val: Iterable[Any] | None = None,
    test: Iterable[Any] | None = None,
    task: TaskLike | None = None,
    example_inputs: Any = None,
    teacher: nn.Module | None = None,
    calibration: Any = None,
    finetune: str | float | bool | None = None,
    workdir: str | Path | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    quiet: bool = False,
) -> Curve:
    """Prune a model to several budgets; return accuracy against MACs, parameters and measured latency.

    The model is traced and evaluated once. Importance is found once, if the search does not work towards a budget
    (`magnitude`, `taylor`, `netslim` with a number as gamma); otherwise (`gamma: auto`, several rounds) every budget
    has a search of its own. Each point is the network that `compress.prune` returns for its budget.

    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 6 * 6, 10))
    >>> val = [(torch.randn(8, 3, 8, 8), torch.randint(10, (8,)))]
    >>> curve = tradeoff(model, {}, ["75%", "50%"], val=val, example_inputs=val[0][0], quiet=True)
    >>> [point.model[0].out_channels for point in curve]
    [12, 8]
    >>> curve["50%"].save("half")  # doctest: +SKIP

    Args:
        model, train, val, test, task, example_inputs, teacher, calibration, device, quiet: as in `compress.prune`.
        recipe: as in `compress.prune`; its export is ignored.
        budgets: what is left, in the unit of the recipe's budget (default: MACs); a dict is a whole budget.
        finetune: length of fine-tuning at each point, such as "100 steps"; False: none; True: as the recipe says, or of
            the default length if it has none; default: as the recipe says.
        workdir: folder for the points, tradeoff.json and tradeoff.html.
        resume: continue in `workdir`: finished points are kept; the budgets may be others.

    Raises:
        BudgetError: some budgets cannot be met; the message lists them, before the search.
        NotReady: something is missing or does not fit, or the recipe's budget is `auto`.
        The other errors of `compress.prune`.
    """
    settings, model = _load_recipe(recipe, finetune), unwrap_model(model)
    teacher = None if teacher is None or teacher is model else unwrap_teacher(teacher)
    folder = None if workdir is None else Path(workdir)
    if resume and folder is None:
        raise NotReady("resume: there is no workdir to continue from; give workdir=FOLDER")
    wanted = _parse_budgets(budgets, settings.budget.unit)
    if folder is not None:
        on_rank_zero(lambda: _check_folder(folder, resume))
    inputs = UserInputs(train, val, task, example_inputs, teacher, calibration, test)
    options: dict[str, Any] = {"device": device, "quiet": quiet, "resume": resume}
    display = ProgressDisplay(quiet or rank() > 0)
    start = time.monotonic()
    search_folder = None if folder is None else folder / SEARCH_FOLDER
    with Run.start(model, settings, inputs, workdir=search_folder, **options) as run:
        shared = SharedSearch.run(run, wanted, search_folder)
        completed = run.recipe  # a recipe that names no search has the one that follows from the data
    points: list[Point] = []
    search_time, start = time.monotonic() - start, time.monotonic()
    for i, budget in enumerate(wanted):
        left = "" if not i else f", {_format_clock((time.monotonic() - start) / i * (len(wanted) - i))} left"
        display.message(f"trade-off: {budget}, {i + 1} of {len(wanted)}{left}")
        point_folder = None if folder is None else folder / folder_name(budget)
        at_budget = settings.model_copy(update={"budget": budget})
        pruned = run_pruning(model, at_budget, inputs, point_folder, shared=shared, **options)
        points.append(Point(pruned.model, pruned.plan, pruned.report, budget))
    searches = "one search served all budgets" if can_share_search(completed) else "every budget had its own search"
    notes = [f"{completed.search.method}: {searches}", f"{search_time:.0f} s before the first cut"]
    curve = Curve(points, settings.budget.unit, notes)
    if curve.metric is None:
        curve.notes.append(f"no metric: {NOT_MEASURED}")
    if folder is not None and not rank():
        remove_temporary_files(folder)
        write_atomic(folder / JSON_FILE, curve.to_json().encode())
        write_atomic(folder / PAGE_FILE, render_curve(curve).encode())
        CheckpointStore(folder / SEARCH_FOLDER).delete()
    wait_for_all()
    return curve


def folder_name(budget: Budget) -> str:
    """Return the folder of a budget's network: macs_60, macs_20M_params_40."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", str(budget)).strip("_")


def _load_recipe(recipe: RecipeLike, finetune: str | float | bool | None) -> Recipe:
    """Load the recipe without its export, and with the length of fine-tuning that was asked for.

    Raises:
        NotReady: the budget is `auto`.
    """
    if isinstance(recipe, dict) and "budget" not in recipe and "extends" not in recipe:
        recipe = {**recipe, "budget": OWN_BUDGET}
    settings = Recipe.load(recipe)
    if settings.budget.auto:
        raise NotReady("budget: auto lets the search learn one size; a trade-off needs a budget in macs, params, ...")
    if settings.target.operations:
        raise NotReady("target.operations: a choice between operations has no list of budgets; use compress.prune")
    update: dict[str, Any] = {"export": None}
    if finetune is False:
        update["finetune"] = None
    settings = settings.model_copy(update=update)
    if finetune is None or finetune is False or (finetune is True and (settings.finetune or settings.is_automatic)):
        return settings
    data = settings.model_dump(mode="json", exclude_none=True)
    data["finetune"] = {} if finetune is True else {**(data.get("finetune") or {"distill": {}}), "epochs": finetune}
    return Recipe.load(data)


def _parse_budgets(budgets: Sequence[float | str | dict[str, Any] | Budget], unit: str) -> list[Budget]:
    """Return the budgets, each once, in the order that was asked for.

    Raises:
        NotReady: there are none, or some are not budgets.
    """
    parsed: list[Budget] = []
    problems = []
    if isinstance(budgets, (str, int, float, dict, Budget)):
        budgets = [budgets]
    for value in budgets or []:
        try:
            budget = read_budget(value, unit)
        except RecipeError as error:
            problems.append(str(error))
            continue
        if budget.auto:
            problems.append("expected what is left, such as 50%; got auto")
        if budget not in parsed:
            parsed.append(budget)
    if problems:
        raise NotReady("budgets:\n  " + "\n  ".join(problems))
    if not parsed:
        raise NotReady('budgets: expected at least one, such as ["80%", "60%", "40%"]; got none')
    return parsed


def _check_folder(folder: Path, resume: bool) -> None:
    """Check that the working directory is new, or that of a trade-off to continue.

    Raises:
        FileExistsError: it holds other files, or a trade-off that is not resumed.
    """
    files = [] if not folder.exists() else [p for p in folder.iterdir() if not is_temporary_file(p)]
    if files and not (folder / SEARCH_FOLDER).is_dir():
        raise FileExistsError(f"{folder}: expected an empty or missing directory; it holds {files[0].name}")
    if files and not resume:
        raise FileExistsError(f"{folder}: holds a trade-off: continue with resume=True (--resume), or choose another")
    folder.mkdir(parents=True, exist_ok=True)


def _format_clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
