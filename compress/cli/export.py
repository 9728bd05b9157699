"""compress export."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from compress.data import DATA_SOURCES, TrainValLoaders, is_factory, loaders
from compress.pipeline import export_network
from compress.progress import ProgressDisplay
from compress.recipe import Data, Export, Timing
from compress.report import Report
from compress.storage import YOLO_FILE, find_saved
from compress.surgery import Plan
from compress.surgery import load as load_model
from compress.training import Classification

from .models import build_model, import_from_current_directory
from .options import (
    CfgOptionsOption,
    DataOption,
    DetectorOption,
    JsonOption,
    OptionalModelOption,
    ShapeOption,
    check_one_model,
    console,
    error_console,
    example_input,
)

STATUS = "exporting, comparing and timing"


def export(
    directory: Annotated[Path, typer.Argument(help="folder written by compress prune or Pruned.save")],
    onnx: Annotated[Path, typer.Option("--onnx", help="the file to write")],
    model: OptionalModelOption = None,
    data: DataOption = None,
    shape: ShapeOption = None,
    detector: DetectorOption = None,
    cfg_options: CfgOptionsOption = None,
    part: Annotated[
        str | None,
        typer.Option("--part", help="part of the --mmdet detector: detector or features", show_default="detector"),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            "--images",
            help="images on which the --mmdet detector is compared: a file or a folder",
            show_default="its validation data",
        ),
    ] = None,
    opset: Annotated[
        int | None, typer.Option("--opset", help="version of ONNX's operators", show_default="torch's default")
    ] = None,
    static: Annotated[bool, typer.Option("--static", help="accept only the batch size of the example")] = False,
    any_size: Annotated[bool, typer.Option("--any-size", help="accept images of any height and width")] = False,
    slim: Annotated[bool, typer.Option(help="simplify the graph with onnxslim")] = True,
    half: Annotated[bool, typer.Option("--half", help="weights in half precision")] = False,
    int8: Annotated[Path | None, typer.Option("--int8", help="also write this file, quantized; needs --data")] = None,
    as_json: JsonOption = False,
) -> None:
    """Export a saved result to an ONNX file, compare it with the network and time it against the dense model.

    Examples:

    compress export out --model torchvision:resnet50 --onnx r50.onnx

    compress export out --model timm:resnet50 --data folder:imagenet --onnx r50.onnx --int8 r50_int8.onnx

    compress export out --mmdet cascade-mask-rcnn_swin-t-p4-w7_fpn_3x_coco --onnx detector.onnx --images pictures
    """
    if model is None and detector is None and (directory / YOLO_FILE).exists():
        raise ValueError(
            f"{directory}: a pruned YOLO is exported by Ultralytics' own exporter, which keeps its metadata: "
            f"compress.yolo.load({str(directory)!r}).export(format='onnx')"
        )
    check_one_model({"--model": model, "--mmdet": detector})
    if detector is not None:
        ignored: dict[str, Any] = {"--data": data, "--input": shape, "--int8": int8, "--half": half or None}
        ignored |= {"--static": static or None, "--any-size": any_size or None}
        if given_options := [name for name, value in ignored.items() if value is not None]:
            raise ValueError(
                f"{given_options[0]}: not for --mmdet, whose files take pixels in any size; see --part and --images"
            )
        if Path(detector).is_file():  # its config may import modules that lie beside it
            import_from_current_directory()
        from compress.mmdet.commands import export_saved_detector

        with error_console.status(STATUS):
            report = export_saved_detector(
                directory, detector, cfg_options or [], onnx, part or "detector", images, opset, slim
            )
        print(report.to_json()) if as_json else console.print(report)
        return
    assert model is not None
    if part is not None or images is not None or cfg_options:
        raise ValueError("--part, --images, --cfg-options: only for --mmdet; --model takes --data")
    if int8 is not None and int8.resolve() == onnx.resolve():
        raise ValueError(f"--int8 {int8}: expected another file than --onnx, from which it is made; choose another")
    if int8 is not None and data is None:
        raise ValueError(f"--int8 {int8}: its ranges are measured on data; give --data, which takes {DATA_SOURCES}")
    from compress.exporters import ExportJob, need_onnx

    need_onnx()
    directory = find_saved(directory)
    dense = build_model(model)
    compact = load_model(copy.deepcopy(dense), directory)
    recipe = Report.load(directory / "report.json").recipe if (directory / "report.json").exists() else {}
    task = Classification(*_loaders(recipe, data, shape))
    job = ExportJob(
        dense=dense,
        compact=compact,
        settings=Export(
            dynamic_batch=not static, dynamic_size=any_size, opset=opset, slim=slim, half=half, int8=int8 is not None
        ),
        task=task,
        example_inputs=_example_inputs(dense, task, data, shape),
        plan=Plan.load(directory / "plan.json"),
        recipe=recipe,
        timing=Timing.model_validate(recipe.get("timing") or {}),
        path=onnx,
        int8_path=int8,
    )
    with error_console.status(STATUS):
        report = export_network(job)
    print(report.to_json()) if as_json else console.print(report)


def _example_inputs(model: torch.nn.Module, task: Classification, data: str | None, shape: str | None) -> Any:
    """Return an input of the shape of `--input`, the first batch of `--data`, or one sample of the recipe's data."""
    if task.val is None or shape is not None:
        return example_input(model, shape)
    first_batch = task.inputs(next(iter(task.val)))
    return first_batch if data is not None else first_batch[:1]


def _loaders(recipe: dict[str, Any], data: str | None, shape: str | None) -> TrainValLoaders:
    """Return the loaders of `--data`; without `--data` and `--input`, those of the saved recipe if its data is here.

    A factory is called only if the user typed it: the saved recipe may be somebody else's.
    """
    saved_data = Data.model_validate(recipe.get("data") or {})
    if data is not None:
        if is_factory(data):
            import_from_current_directory()
        return loaders(saved_data.model_copy(update={"source": data}))
    if shape is not None or saved_data.source is None or recipe.get("task") is not None:
        return None, None
    if is_factory(saved_data.source):
        ProgressDisplay().message(
            f"the saved recipe: its data factory {saved_data.source!r} is not called; to use it, type --data "
            f"{saved_data.source!r}"
        )
        return None, None
    try:
        return loaders(saved_data)
    except (OSError, ValueError, ImportError):
        return None, None
