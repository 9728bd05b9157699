"""Options and consoles that several commands share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from compress.data import DATA_SOURCES, calibration_loader, is_factory, loaders, test_loader
from compress.progress import ProgressDisplay
from compress.recipe import Recipe
from compress.storage import isolated_random_state

from . import models

console = Console()
error_console = Console(stderr=True)

ModelOption = Annotated[str, typer.Option("--model", help=models.MODEL_FORMS)]
OptionalModelOption = Annotated[str | None, typer.Option("--model", help=models.MODEL_FORMS)]
OptionalRecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help="name of a packaged recipe, or path of a YAML file",
        show_default="with --budget: by the data that there is",
        autocompletion=models.complete_recipe,
    ),
]
BudgetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        metavar="50% | UNIT=LIMIT ...",
        help="what is left, in place of the recipe's budget: 50% (of the MACs), macs=20M, params=40%, size=10MB, "
        "latency=5ms; several: all hold",
    ),
]
WeightsOption = Annotated[
    Path | None, typer.Option("--weights", help="state dict: .safetensors, or .pt (read without running its code)")
]
TeacherOption = Annotated[
    str | None,
    typer.Option("--teacher", help="network to distil from, in the forms of --model", show_default="the model itself"),
]
TeacherWeightsOption = Annotated[
    Path | None, typer.Option("--teacher-weights", help="weights of the --teacher, as for --weights")
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
TaskOption = Annotated[
    str | None,
    typer.Option("--task", help="package.module:factory of a compress.Task: loss, metrics and data; instead of --data"),
]
TestOption = Annotated[
    str | None,
    typer.Option(
        "--test", help="data that choose nothing, for the final figures: the validation part of a source as for --data"
    ),
]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration", help="inputs without labels for compensate: folder:FOLDER of images, or a source as for --data"
    ),
]
DetectorOption = Annotated[
    str | None,
    typer.Option("--mmdet", help="instead of --model: an mmdet config, as a path, mmdet::FOLDER/NAME.py or by name"),
]
CheckpointOption = Annotated[Path | None, typer.Option("--checkpoint", help="weights of the --mmdet detector")]
CfgOptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--cfg-options", metavar="KEY=VALUE ...", help="changes to the --mmdet config, or to Ultralytics' settings"
    ),
]
YoloOption = Annotated[
    str | None,
    typer.Option("--yolo", help="instead of --model: a YAML of Ultralytics such as yolo11n.yaml, or a checkpoint .pt"),
]
TrustPickleOption = Annotated[
    bool,
    typer.Option("--trust-pickle", help="read a --yolo checkpoint even if the code in it has to be run for it"),
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


def parse_budget(texts: Sequence[str]) -> str | dict[str, str]:
    """Return the budget that `--budget` gives: a bare fraction or `auto`, or limits by unit.

    >>> parse_budget(["50%"]), parse_budget(["macs=20M,params=40%", "latency=5ms"])
    ('50%', {'macs': '20M', 'params': '40%', 'latency': '5ms'})

    Raises:
        ValueError: a text is not UNIT=LIMIT, and is not alone; or a unit comes twice.
    """
    words = [word.strip() for text in texts for word in text.split(",")]
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    limits: dict[str, str] = {}
    for word in words:
        unit, equals, limit = (part.strip() for part in word.partition("="))
        if not equals or not unit or not limit or unit in limits:
            problem = "a unit twice" if unit in limits else repr(word)
            raise ValueError(f"--budget: expected 50%, or UNIT=LIMIT once for each unit, as macs=20M; got {problem}")
        limits[unit] = limit
    return limits


def load_recipe(
    name: str | None, budget: Sequence[str] | None, data: str | None = None, seed: int | None = None
) -> Recipe:
    """Load a recipe with the budget, the data source and the seed of the command line.

    Raises:
        ValueError: there is neither a recipe nor a budget.
        RecipeError: the recipe is invalid.
    """
    if name is None and not budget:
        raise ValueError("--recipe or --budget: expected one of the two, or both; --budget 50% halves the MACs")
    changes: dict[str, Any] = {} if name is None else {"extends": name}
    changes |= {} if seed is None else {"seed": seed}
    changes |= {"budget": parse_budget(budget)} if budget else {}
    recipe = Recipe.load(changes if name is None or len(changes) > 1 else name)
    if data is None:
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"source": data})})


def load_recipe_to_run(
    name: str | None,
    budget: Sequence[str] | None,
    data: str | None,
    task: str | None,
    seed: int | None = None,
    other_sources: Sequence[str | None] = (),
) -> Recipe:
    """Load a recipe for a run on its data or its task; only code that the user typed may be imported.

    Args:
        name, budget, data, task, seed: as typed; None where the option is missing.
        other_sources: data that other options name; a factory among them is imported from the current directory, too.

    Raises:
        ValueError: the recipe names a factory that the user has not typed, or both a task and data are typed.
        RecipeError: the recipe is invalid.
    """
    if task is not None and data is not None:
        raise ValueError("--task: a task has its own data; leave --data out")
    recipe = load_recipe(name, budget, data, seed)
    if task is not None:
        recipe = recipe.model_copy(update={"task": task})
    if data is None and task is None:
        named = {"--task": recipe.task, "--data": recipe.data.source if is_factory(recipe.data.source) else None}
        for option, factory in named.items():
            if factory is not None:
                key = "task" if option == "--task" else "data.source"
                raise ValueError(
                    f"{key} of recipe {name}: a command imports only code that you type, because a recipe may be "
                    f"somebody else's; got {factory!r}. If you trust it, add {option} {factory}"
                )
    if task is not None or any(map(is_factory, (data, *other_sources))):
        models.import_from_current_directory()
    return recipe


def data_arguments(recipe: Recipe, data: str | None, test: str | None, calibration: str | None) -> dict[str, Any]:
    """Return the data that a command names, as keyword arguments of `compress.prune`.

    Args:
        recipe: with the source of `--data`, if that is given; it replaces the data of the recipe's task.
        data, test, calibration: as typed; None where the option is missing.

    Raises:
        ValueError: a source does not exist, or has no data of its kind.
        FileNotFoundError: the folder for calibration holds no images.
    """
    arguments: dict[str, Any] = {}
    if data is not None:
        arguments["train"], arguments["val"] = loaders(recipe.data)
        arguments["test"] = test_loader(recipe.data)
    if test is not None:
        if test == recipe.data.source:
            raise ValueError(f"--test {test}: expected data that choose nothing; these are the data of the run")
        arguments["test"] = loaders(recipe.data.model_copy(update={"source": test}))[1]
        if arguments["test"] is None:
            raise ValueError(f"--test {test}: expected a source with validation data; it has none")
    if calibration is not None:
        arguments["calibration"] = calibration_loader(calibration, recipe.data)
    return arguments


def example_input(model: torch.nn.Module, shape: str | None) -> torch.Tensor:
    """Return a random input for a model.

    Args:
        model: gives the size of an image if there is no shape.
        shape: text of `--input`; three sizes are one image, to which a batch dimension is added.
    """
    sizes = list(models.image_size(model)) if shape is None else parse_shape(shape)
    sizes = [1] * (len(sizes) == 3) + sizes
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0))


def build_model_with_notice(spec: str, weights: Path | None, option: str = "--model", seed: int = 0) -> torch.nn.Module:
    """Build the model of an option, and say what its weights are if there is no file of them.

    Random weights follow from the seed: the same command with `--resume` builds the same network.
    """
    with isolated_random_state(seed):
        model = models.build_model(spec, weights, option)
    if weights is None and os.environ.get("RANK", "0") == "0":
        ProgressDisplay().message(models.weights_notice(spec, option))
    return model


def check_one_model(options: Mapping[str, str | None]) -> None:
    """Check that exactly one of the options that name a model is given.

    Args:
        options: name -> value.

    Raises:
        ValueError: several or none are given.
    """
    if sum(value is not None for value in options.values()) != 1:
        *names, last = options
        count = {2: "two", 3: "three"}[len(options)]
        raise ValueError(f"{', '.join(names)} or {last}: expected one of the {count}")
