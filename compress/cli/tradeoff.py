"""compress tradeoff."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compress.distributed import rank
from compress.recipe import parse_allowed_loss
from compress.startup import INTERRUPTED
from compress.tradeoffs import DEFAULT_BUDGETS, folder_name
from compress.tradeoffs import tradeoff as make_curve

from .options import (
    CalibrationOption,
    DataOption,
    JsonOption,
    ModelOption,
    OptionalRecipeOption,
    ShapeOption,
    TaskOption,
    TestOption,
    WeightsOption,
    build_model_with_notice,
    console,
    data_arguments,
    error_console,
    example_input,
    load_recipe_to_run,
)


def tradeoff(
    model: ModelOption,
    workdir: Annotated[Path, typer.Option("--workdir", help="folder for the networks, tradeoff.json and .html")],
    recipe: OptionalRecipeOption = None,
    budgets: Annotated[
        str, typer.Option("--budgets", help="what is left, in the unit of the recipe's budget, separated by commas")
    ] = ",".join(DEFAULT_BUDGETS),
    finetune: Annotated[
        str | None,
        typer.Option(
            "--finetune", help="training at each budget: 100 steps, 2 epochs, no", show_default="the recipe's"
        ),
    ] = None,
    pick: Annotated[
        str | None, typer.Option("--pick", help="name the smallest network that loses at most this: 1%")
    ] = None,
    data: DataOption = None,
    task: TaskOption = None,
    test: TestOption = None,
    calibration: CalibrationOption = None,
    weights: WeightsOption = None,
    shape: ShapeOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="keep the finished points of the workdir")] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, cuda:1", show_default="a GPU if there is one")
    ] = None,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="show no progress")] = False,
) -> None:
    """Prune a model to several budgets: accuracy against MACs, parameters and latency, as a table, a page and JSON.

    Examples:

    compress tradeoff --model timm:resnet50 --weights r50.safetensors --recipe magnitude_half --data folder:imagenet
    --budgets 90%,80%,70%,60% --workdir curve --pick 1%

    compress tradeoff --model timm:resnet50 --weights r50.safetensors --recipe repair_half --calibration folder:photos
    --workdir curve

    Exit codes: 0 done, 1 a budget cannot be met or no network is good enough for --pick, 2 invalid input.
    """
    if pick is not None:
        parse_allowed_loss(pick, "--pick")
    budget = ["50%"] if recipe is None else None  # no network is cut to it
    settings = load_recipe_to_run(recipe, budget, data, task, other_sources=(calibration, test))
    inputs = data_arguments(settings, data, test, calibration)
    network = build_model_with_notice(model, weights, seed=settings.seed)
    has_no_data = settings.data.source is None and settings.task is None and calibration is None
    if shape is not None or has_no_data:
        inputs["example_inputs"] = example_input(network, shape)
    length: str | bool | None = False if finetune in ("no", "none", "false", "0") else finetune
    try:
        curve = make_curve(
            network,
            settings,
            [budget.strip() for budget in budgets.split(",")],
            finetune=length,
            workdir=workdir,
            resume=resume,
            device=device,
            quiet=quiet,
            **inputs,
        )
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if rank():
        return
    print(curve.to_json()) if as_json else console.print(curve)
    if not as_json:
        page = workdir / "tradeoff.html"
        console.print(f"saved in {workdir}; open {page}", markup=False, highlight=False, soft_wrap=True)
    if pick is not None:
        chosen = curve.pick(pick)
        text = f"the smallest network that loses at most {pick}: {chosen.budget}, in"
        where = console if not as_json else error_console
        where.print(text, workdir / folder_name(chosen.budget), markup=False, highlight=False, soft_wrap=True)
