"""compress sensitivity."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from compress.data import DATA_SOURCES, calibration_loader, loaders
from compress.diagnostics import DEFAULT_WIDTHS
from compress.diagnostics import sensitivity as measure_sensitivity
from compress.distributed import rank
from compress.recipe import parse_allowed_loss
from compress.startup import INTERRUPTED
from compress.training import load_task

from .models import complete_recipe
from .options import (
    CalibrationOption,
    DataOption,
    JsonOption,
    ModelOption,
    ShapeOption,
    TaskOption,
    WeightsOption,
    build_model_with_notice,
    console,
    example_input,
    load_recipe_to_run,
)


def sensitivity(
    model: ModelOption,
    data: DataOption = None,
    task: TaskOption = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="recipe whose target, data and task are used", autocompletion=complete_recipe),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="kinds of dimensions, in place of the recipe's: auto, or some of channels, residual, attention, mlp, "
            "embedding, selection, separated by commas",
        ),
    ] = None,
    widths: Annotated[
        str, typer.Option("--widths", help="fractions of each group's width, separated by commas")
    ] = ",".join(DEFAULT_WIDTHS),
    batches: Annotated[int, typer.Option("--batches", help="batches of validation data for each point")] = 8,
    search: Annotated[
        str, typer.Option("--search", help="what ranks the dimensions of a group: magnitude, taylor, random")
    ] = "magnitude",
    repair: Annotated[
        bool, typer.Option("--repair/--no-repair", help="measure each point again after repair by least squares")
    ] = True,
    calibration: CalibrationOption = None,
    lost: Annotated[str, typer.Option("--lost", help="what a group alone may lose, for the suggested bounds")] = "2%",
    workdir: Annotated[
        Path | None,
        typer.Option("--workdir", help="folder for sensitivity.json and sensitivity.html", show_default="none"),
    ] = None,
    weights: WeightsOption = None,
    shape: ShapeOption = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, cuda:1", show_default="a GPU if there is one")
    ] = None,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="show no progress")] = False,
) -> None:
    """Show how loss and accuracy react as each group alone is narrowed, the most fragile group first.

    Nothing is trained. Points are measured on validation data, and repaired on training data. The suggested bounds are
    text that you may copy into a recipe.

    Example: compress sensitivity --model timm:resnet50 --weights r50.safetensors --data folder:imagenet --workdir out

    Exit codes: 0 done, 2 invalid input.
    """
    parse_allowed_loss(lost, "--lost")
    budget = ["50%"] if recipe is None else None  # nothing is cut to it; only target, data and task are used
    settings = load_recipe_to_run(recipe, budget, data, task, other_sources=(calibration,))
    inputs: dict[str, Any] = {}
    if settings.data.source is not None and task is None:
        train, val = loaders(settings.data)
        inputs["data"], inputs["calibration"] = (train, None) if val is None else (val, train)
    elif settings.task is not None:
        inputs["task"] = load_task(settings.task)
    else:
        raise ValueError(f"--data: expected data to measure on: {DATA_SOURCES}; got none, and the recipe names none")
    if calibration is not None:
        inputs["calibration"] = calibration_loader(calibration, settings.data)
    network = build_model_with_notice(model, weights)
    if shape is not None:
        inputs["example_inputs"] = example_input(network, shape)
    try:
        result = measure_sensitivity(
            network,
            **inputs,
            widths=[width.strip() for width in widths.split(",")],
            batches=batches,
            target=settings.target if target is None else _parse_kinds(target),
            search=search,
            repair=repair,
            device=device,
            quiet=quiet,
        )
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if rank():
        return
    if workdir is not None:
        result.save(workdir, lost)
    if as_json:
        print(result.to_json())
        return
    console.print(result)
    for repaired in (False, *[True] * result.is_repaired):
        console.print(result.bounds(lost, repaired=repaired), markup=False, highlight=False, soft_wrap=True)
    if workdir is not None:
        page = workdir / "sensitivity.html"
        console.print(f"saved in {workdir}; open {page}", markup=False, highlight=False, soft_wrap=True)


def _parse_kinds(text: str) -> str | dict[str, bool]:
    """Return the section `target` of kinds that are separated by commas; channels only if they are named.

    >>> _parse_kinds("mlp, attention")
    {'channels': False, 'mlp': True, 'attention': True}
    """
    kinds = [kind.strip() for kind in text.split(",")]
    return "auto" if kinds == ["auto"] else {"channels": False} | dict.fromkeys(kinds, True)
