"""Options and consoles that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from compress.data import DATA_SOURCES
from compress.progress import ProgressDisplay

from . import models

console = Console()
error_console = Console(stderr=True)

ModelOption = Annotated[str, typer.Option("--model", help=models.MODEL_FORMS)]
OptionalModelOption = Annotated[str | None, typer.Option("--model", help=models.MODEL_FORMS)]
RecipeOption = Annotated[str, typer.Option("--recipe", help="name of a packaged recipe, or path of a YAML file")]
WeightsOption = Annotated[
    Path | None, typer.Option("--weights", help="state dict: .safetensors, or .pt (read without running its code)")
]
ShapeOption = Annotated[
    str | None,
    typer.Option(
        "--input",
        help="shape of the example input: one image or a batch",
        show_default="1,3,224,224, or the input size of a timm model",
    ),
]
DataOption = Annotated[str | None, typer.Option("--data", help=f"data to train and evaluate on: {DATA_SOURCES}")]
DetectorOption = Annotated[
    str | None,
    typer.Option("--mmdet", help="instead of --model: an mmdet config, as a path, mmdet::FOLDER/NAME.py or by name"),
]
CheckpointOption = Annotated[Path | None, typer.Option("--checkpoint", help="weights of the --mmdet detector")]
CfgOptionsOption = Annotated[
    list[str] | None, typer.Option("--cfg-options", metavar="KEY=VALUE ...", help="changes to the --mmdet config")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


def parse_shape(text: str) -> list[int]:
    """Return the sizes of a shape such as `1,3,224,224` or `3x224x224`.

    Raises:
        ValueError: the text is not a shape.
    """
    try:
        sizes = [int(size) for size in text.replace("x", ",").split(",")]
        if min(sizes) < 1:
            raise ValueError
    except ValueError:
        raise ValueError(f"--input {text}: expected a shape such as 1,3,224,224") from None
    return sizes


def example_input(model: torch.nn.Module, shape: str | None) -> torch.Tensor:
    """Return a random input for a model.

    Args:
        model: gives the size of an image if there is no shape.
        shape: text of `--input`; three sizes are one image, to which a batch dimension is added.
    """
    sizes = list(models.image_size(model)) if shape is None else parse_shape(shape)
    sizes = [1] * (len(sizes) == 3) + sizes
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0))


def build_model_with_notice(spec: str, weights: Path | None) -> torch.nn.Module:
    """Build the model of `--model`, and say what its weights are if `--weights` is missing."""
    model = models.build_model(spec, weights)
    if weights is None and os.environ.get("RANK", "0") == "0":
        ProgressDisplay().message(models.weights_notice(spec))
    return model


def check_one_model(model: str | None, detector: str | None) -> None:
    """Check that exactly one of `--model` and `--mmdet` is given.

    Raises:
        ValueError: both or none are given.
    """
    if (model is None) == (detector is None):
        raise ValueError("--model or --mmdet: expected one of the two")
