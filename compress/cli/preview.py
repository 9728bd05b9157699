"""compress preview."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from compress.api import preview as preview_model

from .models import import_from_current_directory, load_weights_
from .options import (
    BudgetOption,
    CfgOptionsOption,
    CheckpointOption,
    DetectorOption,
    JsonOption,
    OptionalModelOption,
    OptionalRecipeOption,
    ShapeOption,
    TrustPickleOption,
    WeightsOption,
    YoloOption,
    build_model_with_notice,
    check_one_model,
    console,
    error_console,
    example_input,
    load_recipe,
    parse_shape,
)

DETECTOR_INPUT = "3,256,256"


def preview(
    model: OptionalModelOption = None,
    recipe: OptionalRecipeOption = None,
    budget: BudgetOption = None,
    weights: WeightsOption = None,
    shape: ShapeOption = None,
    detector: DetectorOption = None,
    checkpoint: CheckpointOption = None,
    cfg_options: CfgOptionsOption = None,
    yolo: YoloOption = None,
    trust_pickle: TrustPickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a recipe would do to a model, without training: groups, widths, costs, and whether the budget is met.

    Examples:

    compress preview --model torchvision:resnet50 --recipe magnitude_half

    compress preview --mmdet cascade-mask-rcnn_swin-t-p4-w7_fpn_3x_coco --recipe swin_t_cascade_40

    compress preview --yolo yolo11n.yaml --recipe yolo_half

    A detector or YOLO runs on an image of --input, by default of 256 x 256 pixels; no data are read.

    Exit code 1 if the budget cannot be met.
    """
    settings = load_recipe(recipe, budget)
    check_one_model({"--model": model, "--mmdet": detector, "--yolo": yolo})
    example: Any
    if detector is not None:
        if weights is not None:
            raise ValueError("--weights: not for --mmdet, which takes --checkpoint")
        if Path(detector).is_file():  # its config may import modules that lie beside it
            import_from_current_directory()
        from compress.mmdet.commands import build_for_preview

        size = parse_shape(shape or DETECTOR_INPUT)[-2:]
        network, settings, example = build_for_preview(detector, checkpoint, cfg_options or [], size, settings)
    elif checkpoint is not None:
        raise ValueError("--checkpoint: only for --mmdet; --model and --yolo take --weights")
    elif cfg_options:
        raise ValueError("--cfg-options: only for --mmdet; a preview reads no data. Give the size as --input 3,320,320")
    elif trust_pickle and yolo is None:
        raise ValueError("--trust-pickle: only for --yolo")
    elif yolo is not None:
        from compress.yolo import build

        network = build(yolo, trust_pickle=trust_pickle).model
        if weights is not None:
            load_weights_(network, weights)
        example = example_input(network, shape or DETECTOR_INPUT)
    else:
        assert model is not None
        network = build_model_with_notice(model, weights)
        example = example_input(network, shape)
    with error_console.status("finding the groups and verifying them on the example input"):
        result = preview_model(network, settings, example_inputs=example)
    if as_json:
        print(result.to_json())
    else:
        result.show(console)
    raise typer.Exit(0 if result.reachable else 1)
