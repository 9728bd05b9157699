"""compress landscape."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from compress.data import DATA_SOURCES, is_factory, loaders
from compress.diagnostics import landscape as evaluate_landscape
from compress.distributed import rank
from compress.recipe import Data
from compress.report import Report, render_page
from compress.startup import INTERRUPTED
from compress.storage import find_saved, lock_directory, write_atomic
from compress.surgery import Plan
from compress.surgery import load as load_model
from compress.training import pick_device

from .models import import_from_current_directory
from .options import (
    DataOption,
    JsonOption,
    ModelOption,
    WeightsOption,
    build_model_with_notice,
    console,
    error_console,
)

PLAN_FILE, REPORT_FILE, PAGE_FILE, LANDSCAPE_FILE = "plan.json", "report.json", "report.html", "landscape.json"


def landscape(
    directory: Annotated[Path, typer.Argument(help="folder written by compress prune or Pruned.save")],
    model: ModelOption,
    data: DataOption = None,
    weights: WeightsOption = None,
    on_train: Annotated[
        bool, typer.Option("--train/--val", help="batches of the training or of the validation data")
    ] = False,
    batches: Annotated[int, typer.Option("--batches", help="number of batches")] = 8,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="images in a batch", show_default="the saved recipe's", min=1)
    ] = None,
    resolution: Annotated[
        int, typer.Option("--resolution", help="points of the loss along each direction, an odd number")
    ] = 21,
    variance_resolution: Annotated[
        int, typer.Option("--variance-resolution", help="points of the gradient variance, an odd number; 0: none")
    ] = 9,
    span: Annotated[
        float, typer.Option("--range", help="the plane goes from -RANGE to RANGE, in lengths of the filters")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="of the directions")] = 0,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, cuda:1", show_default="a GPU if there is one")
    ] = None,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="show no progress")] = False,
) -> None:
    """Draw the loss and the gradient noise of the dense and the compact network around their weights.

    Writes landscape.json into the folder, and a section into its report.html. An interrupted command continues where
    it was stopped.

    Examples:

    compress landscape out --model timm:resnet50 --weights r50.safetensors --data folder:imagenet

    compress landscape out --model timm:resnet50 --weights r50.safetensors --data folder:imagenet --resolution 11
    --variance-resolution 0 --range 0.5 --batches 4
    """
    directory = find_saved(directory)
    if not (directory / PLAN_FILE).is_file():
        raise FileNotFoundError(
            f"{directory}: expected a folder written by compress prune or Pruned.save; it has no {PLAN_FILE}"
        )
    plan = Plan.load(directory / PLAN_FILE)
    report = Report.load(directory / REPORT_FILE) if (directory / REPORT_FILE).exists() else None
    loader = _loader({} if report is None else report.recipe, data, batch_size, on_train)
    seed_of_run = 0 if report is None else int(report.recipe.get("seed", 0))  # of random weights
    dense = build_model_with_notice(model, weights, seed=seed_of_run)
    compact = load_model(copy.deepcopy(dense), directory)
    chosen_device = pick_device(device, dense)  # joins the other processes, if there are any
    try:
        with nullcontext() if rank() else lock_directory(directory):
            result = evaluate_landscape(
                dense,
                loader,
                other=(compact, plan),
                resolution=resolution,
                variance_resolution=variance_resolution or None,
                span=span,
                batches=batches,
                seed=seed,
                file=directory / LANDSCAPE_FILE,
                device=chosen_device,
                quiet=quiet,
            )
            if rank():
                return
            if report is not None:
                report.landscape = result.to_dict()
                write_atomic(directory / PAGE_FILE, render_page(report).encode())
                write_atomic(directory / REPORT_FILE, report.to_json().encode())
    except KeyboardInterrupt:
        if not rank():
            error_console.print("the same command continues from here", highlight=False)
        raise typer.Exit(INTERRUPTED) from None
    print(result.to_json()) if as_json else console.print(result)
    if not as_json:
        drawn = "" if report is None else f"; open {directory / PAGE_FILE}"
        text = f"saved in {directory / LANDSCAPE_FILE}{drawn}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _loader(recipe: dict[str, Any], source: str | None, batch_size: int | None, on_train: bool) -> Iterable[Any]:
    """Return the training or validation loader of `--data`, or of the saved recipe if its data is no code.

    Raises:
        ValueError: there is no data, it is that of a task, or a factory which the user has not typed.
    """
    if recipe.get("task") is not None:
        raise ValueError(
            f"the saved recipe has a task of its own, {recipe['task']!r}, whose code is not called. Use "
            "compress.landscape(model, data, other=(compact, plan), task=task) in Python"
        )
    settings = Data.model_validate(recipe.get("data") or {})
    if source is not None:
        settings = settings.model_copy(update={"source": source})
        if is_factory(source):
            import_from_current_directory()
    elif settings.source is None:
        raise ValueError(f"--data: expected the data on which the loss is evaluated: {DATA_SOURCES}")
    elif is_factory(settings.source):
        raise ValueError(
            f"the saved recipe: its data factory {settings.source!r} is not called; to use it, type --data "
            f"{settings.source!r}"
        )
    if batch_size is not None:
        settings = settings.model_copy(update={"batch_size": batch_size})
    loader = loaders(settings)[0 if on_train else 1]
    if loader is None:
        part = "training" if on_train else "validation"
        raise ValueError(f"--data {settings.source}: it has no {part} data; choose the other part: --train or --val")
    return loader
