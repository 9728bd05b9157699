"""compress prune."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from compress.api import prune as prune_model
from compress.distributed import rank
from compress.modules import is_hugging_face_model
from compress.progress import PROGRESS_VARIABLE, ProgressDisplay
from compress.startup import INTERRUPTED

from .models import import_from_current_directory, load_weights_
from .options import (
    BudgetOption,
    CalibrationOption,
    CfgOptionsOption,
    CheckpointOption,
    DataOption,
    DetectorOption,
    JsonOption,
    OptionalModelOption,
    OptionalRecipeOption,
    ShapeOption,
    TaskOption,
    TeacherOption,
    TeacherWeightsOption,
    TestOption,
    TrustPickleOption,
    WeightsOption,
    YoloOption,
    build_model_with_notice,
    check_one_model,
    console,
    data_arguments,
    example_input,
    load_recipe_to_run,
)


def prune(
    workdir: Annotated[Path, typer.Option("--workdir", help="folder for plan, weights, report and checkpoints")],
    model: OptionalModelOption = None,
    recipe: OptionalRecipeOption = None,
    budget: BudgetOption = None,
    data: DataOption = None,
    task: TaskOption = None,
    test: TestOption = None,
    calibration: CalibrationOption = None,
    weights: WeightsOption = None,
    teacher: TeacherOption = None,
    teacher_weights: TeacherWeightsOption = None,
    shape: ShapeOption = None,
    detector: DetectorOption = None,
    checkpoint: CheckpointOption = None,
    cfg_options: CfgOptionsOption = None,
    yolo: YoloOption = None,
    trust_pickle: TrustPickleOption = False,
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

    compress prune --model timm:resnet50 --weights r50.safetensors --budget 50% --data folder:imagenet --workdir out

    compress prune --model my_project:unet --task my_project:task --recipe unet_half --workdir unet

    compress prune --model torchvision:resnet50 --recipe magnitude_half --budget macs=1.5G,params=12M --workdir out

    compress prune --model timm:resnet50 --weights r50.safetensors --recipe resnet50_imagenet_netslim
    --data folder:imagenet --workdir out

    compress prune --model timm:resnet50 --weights r50.safetensors --recipe repair_half --calibration folder:photos
    --workdir out

    compress prune --mmdet cascade-mask-rcnn_swin-t-p4-w7_fpn_3x_coco --checkpoint detector.pth
    --recipe swin_t_cascade_40 --workdir out --cfg-options train_dataloader.batch_size=4

    compress prune --yolo yolo11n.pt --data coco128.yaml --recipe yolo_half --workdir out --cfg-options imgsz=320

    compress prune ... --workdir out --resume       (continues a run that was stopped)

    torchrun --nproc_per_node 4 -m compress prune ...    (or accelerate launch -m compress prune ...)

    Exit codes: 0 done, 1 the budget cannot be met, 2 invalid input, 130 interrupted, 143 terminated.
    """
    if progress is not None:
        os.environ[PROGRESS_VARIABLE] = progress
    ProgressDisplay(quiet)  # raises if --progress is not one of its modes
    source = data if yolo is None else None
    settings = load_recipe_to_run(recipe, budget, source, task, seed, other_sources=(calibration, test))
    if detector is not None and (cfg_options or Path(detector).is_file()):
        import_from_current_directory()
    check_one_model({"--model": model, "--mmdet": detector, "--yolo": yolo})
    inputs: dict[str, Any] = {}  # keyword arguments of compress.prune
    if detector is not None:
        ignored = {"--data": data, "--task": task, "--weights": weights, "--input": shape, "--teacher": teacher}
        if given_options := [name for name, value in ignored.items() if value is not None]:
            raise ValueError(
                f"{given_options[0]}: not for --mmdet, whose config contains it; see --checkpoint and --cfg-options"
            )
        if test is not None:
            raise ValueError("--test: not for --mmdet, whose evaluator reads the validation data of the config")
        from compress.mmdet.commands import build_for_command

        network, inputs["task"] = build_for_command(detector, checkpoint, cfg_options or [], settings.seed, quiet)
    elif yolo is not None:
        ignored = {"--task": task, "--checkpoint": checkpoint, "--test": test, "--input": shape, "--teacher": teacher}
        network, inputs["task"] = _build_yolo(
            yolo, weights, data, cfg_options or [], trust_pickle, settings.seed, ignored
        )
    elif checkpoint is not None or cfg_options:
        raise ValueError(
            "--checkpoint: only for --mmdet; --cfg-options: for --mmdet and --yolo; --model takes --weights"
        )
    if trust_pickle and yolo is None:
        raise ValueError("--trust-pickle: only for --yolo; --weights reads a .pt file without running its code")
    inputs |= data_arguments(settings, source, test, calibration)
    if model is not None:
        network = build_model_with_notice(model, weights, seed=settings.seed)
        has_no_data = settings.data.source is None and settings.task is None and calibration is None
        if shape is not None or has_no_data:
            inputs["example_inputs"] = example_input(network, shape)
    if teacher is not None:
        inputs["teacher"] = build_model_with_notice(teacher, teacher_weights, "--teacher", settings.seed)
    elif teacher_weights is not None:
        raise ValueError("--teacher-weights: whose weights? Give --teacher as well")
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
    if is_hugging_face_model(pruned.model) and (workdir / "config.json").exists():
        reload_call = f"compress.hf.load({str(workdir)!r})"
    if yolo is not None:
        reload_call = f"compress.yolo.load({str(workdir)!r})"
    if detector is not None:
        device_argument = "" if torch.cuda.is_available() else ", device='cpu'"
        reload_call = (
            "import compress.mmdet, mmdet.apis; "
            f"detector = mmdet.apis.init_detector({str(workdir / 'config.py')!r}{device_argument})"
        )
    console.print(f"reload with {reload_call}", markup=False, highlight=False, soft_wrap=True)


def _build_yolo(
    spec: str,
    weights: Path | None,
    data: str | None,
    options: Sequence[str],
    trust_pickle: bool,
    seed: int,
    ignored: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Return the network of `--yolo` and its task.

    Args:
        ignored: options that do not go with it, by name.

    Raises:
        ValueError: one of these is given, or network, weights, data or settings cannot be used.
        ImportError: ultralytics is not installed, or too old.
    """
    if given_options := [name for name, value in ignored.items() if value is not None]:
        raise ValueError(f"{given_options[0]}: not for --yolo; see --weights, --data and --cfg-options")
    with redirect_stdout(sys.stderr):  # Ultralytics' logger keeps the stream that was stdout when it was imported
        from compress.yolo.commands import build_for_command

    network, task = build_for_command(spec, data, options, trust_pickle, seed)
    if weights is not None:
        load_weights_(network, weights)
    elif not spec.endswith(".pt") and not rank():
        ProgressDisplay().message(f"no --weights: {spec} has random weights; give --weights FILE")
    return network, task
