"""compress preview."""

from __future__ import annotations

import typer

from compress.api import preview as preview_model

from .options import (
    JsonOption,
    ModelOption,
    RecipeOption,
    ShapeOption,
    WeightsOption,
    build_model_with_notice,
    console,
    error_console,
    example_input,
)


def preview(
    model: ModelOption,
    recipe: RecipeOption,
    weights: WeightsOption = None,
    shape: ShapeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a recipe would do to a model, without training: groups, widths, costs, and whether the budget is met.

    Example: compress preview --model torchvision:resnet50 --recipe magnitude_half

    Exit code 1 if the budget cannot be met.
    """
    network = build_model_with_notice(model, weights)
    with error_console.status("finding the groups and verifying them on the example input"):
        result = preview_model(network, recipe, example_inputs=example_input(network, shape))
    if as_json:
        print(result.to_json())
    else:
        result.show(console)
    raise typer.Exit(0 if result.reachable else 1)
