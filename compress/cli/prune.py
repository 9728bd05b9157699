"""compress prune."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from compress.api import prune as prune_model
from compress.data import is_factory, loaders
from compress.distributed import rank
from compress.progress import PROGRESS_VARIABLE, ProgressDisplay
from compress.recipe import Recipe
from compress.startup import INTERRUPTED

from .models import import_from_current_directory
from .options import (
    CfgOptionsOption,
    CheckpointOption,
    DataOption,
    DetectorOption,
    JsonOption,
    OptionalModelOption,
    RecipeOption,
    ShapeOption,
    WeightsOption,
    build_model_with_notice,
    check_one_model,
    console,
    example_input,
)


def prune(
    recipe: RecipeOption,
    workdir: Annotated[Path, typer.Option("--workdir", help="folder for plan, weights, report and checkpoints")],
    model: OptionalModelOption = None,
    data: DataOption = None,
    weights: WeightsOption = None,
    shape: ShapeOption = None,
    detector: DetectorOption = None,
    checkpoint: CheckpointOption = None,
    cfg_options: CfgOptionsOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in the workdir")] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, cuda:1", show_default="a GPU if there is one")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="overrides the seed of the recipe")] = None,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="show no progress")] = False,
    progress: Annotated[
        str | None, typer.Option("--progress", help="auto, plain, json (one line per event) or off")
    ] = None,
) -> None:
    """Search, cut, fine-tune and measure a model as a recipe says; the results are written to the workdir.

    Examples:

    compress prune --model torchvision:resnet50 --recipe magnitude_half --workdir out

    compress prune --model timm:resnet50 --weights r50.safetensors --recipe resnet50_imagenet_netslim
    --data folder:imagenet --workdir out

    compress prune --mmdet cascade-mask-rcnn_swin-t-p4-w7_fpn_3x_coco --checkpoint detector.pth
    --recipe swin_t_cascade_40 --workdir out --cfg-options train_dataloader.batch_size=4

    compress prune ... --workdir out --resume       (continues a run that was stopped)

    torchrun --nproc_per_node 4 -m compress prune ...    (or accelerate launch -m compress prune ...)

    Exit codes: 0 done, 1 the budget cannot be met, 2 invalid input, 130 interrupted.
    """
    if progress is not None:
        os.environ[PROGRESS_VARIABLE] = progress
    ProgressDisplay(quiet)  # raises if --progress is not one of its modes
    settings = _load_recipe(recipe, data, seed)
    names_config = detector is not None and (bool(cfg_options) or Path(detector).is_file())
    if settings.task is not None or is_factory(settings.data.source) or names_config:
        import_from_current_directory()
    check_one_model(model, detector)
    inputs: dict[str, Any] = {}  # keyword arguments of compress.prune
    if detector is not None:
        ignored = {"--data": data, "--weights": weights, "--input": shape}
        if given_options := [name for name, value in ignored.items() if value is not None]:
            raise ValueError(
                f"{given_options[0]}: not for --mmdet, whose config contains it; see --checkpoint and --cfg-options"
            )
        from compress.mmdet.commands import build_for_command

        network, inputs["task"] = build_for_command(detector, checkpoint, cfg_options or [], settings.seed, quiet)
    elif checkpoint is not None or cfg_options:
        raise ValueError("--checkpoint, --cfg-options: only for --mmdet; --model takes --weights")
    if data is not None:  # replaces the data of the recipe's task
        inputs["train"], inputs["val"] = loaders(settings.data)
    if model is not None:
        network = build_model_with_notice(model, weights)
        if shape is not None or (settings.data.source is None and settings.task is None):
            inputs["example_inputs"] = example_input(network, shape)
    try:
        pruned = prune_model(network, settings, workdir=workdir, resume=resume, device=device, quiet=quiet, **inputs)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if rank():
        return
    if as_json:
        print(pruned.report.to_json())
        return
    console.print(pruned.report)
    console.print(f"saved in {workdir}; open {workdir / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
    reload_call = f"compress.load(fresh_dense_model, {str(workdir)!r})"
    if detector is not None:
        reload_call = f"mmdet.apis.init_detector({str(workdir / 'config.py')!r})"
    console.print(f"reload with {reload_call}", markup=False, highlight=False, soft_wrap=True)


def _load_recipe(name: str, data: str | None, seed: int | None) -> Recipe:
    """Load a recipe with the data source and the seed of the command line."""
    if data is None and seed is None:
        return Recipe.load(name)
    recipe = Recipe.load({"extends": name} | ({} if seed is None else {"seed": seed}))
    if data is None:
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"source": data})})
