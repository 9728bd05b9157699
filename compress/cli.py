"""The commands: thin layers over the API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from . import __version__, models
from .api import preview as preview_model
from .api import prune as prune_model
from .files import check_directory
from .quickstart import quickstart as run_quickstart
from .recipe import Recipe, packaged

app = typer.Typer(
    help="Make a PyTorch vision network smaller and faster, exactly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console()
err = Console(stderr=True)

Model = Annotated[str, typer.Option("--model", help=models.FORMS)]
RecipeName = Annotated[str, typer.Option("--recipe", help="a packaged recipe's name or the path of a YAML file")]
Weights = Annotated[Path | None, typer.Option("--weights", help="state dict: .safetensors, or .pt loaded without code")]
Shape = Annotated[str, typer.Option("--input", help="shape of the example input, for one image")]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


def _shape(text: str) -> torch.Tensor:
    try:
        sizes = [int(size) for size in text.replace("x", ",").split(",")]
    except ValueError:
        raise ValueError(f"--input {text}: expected a shape such as 1,3,224,224") from None
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0))


@app.command()
def preview(
    model: Model, recipe: RecipeName, weights: Weights = None, shape: Shape = "1,3,224,224", as_json: Json = False
) -> None:
    """What a recipe would do: groups, widths, costs, and whether the budget can be met. Trains nothing.

    Example: compress preview --model torchvision:resnet50 --recipe magnitude_half

    Exit code 1 if the budget cannot be met.
    """
    with err.status("finding the groups and proving them on the example input"):
        found = preview_model(models.build(model, weights), recipe, example_inputs=_shape(shape))
    if as_json:
        print(found.to_json())
    else:
        found.show(out)
    raise typer.Exit(0 if found.reachable else 1)


@app.command()
def prune(
    model: Model,
    recipe: RecipeName,
    workdir: Annotated[Path, typer.Option("--workdir", help="where plan, weights and report go")],
    weights: Weights = None,
    shape: Shape = "1,3,224,224",
    as_json: Json = False,
) -> None:
    """Cut a model as a recipe says and save the plan, the weights and the report.

    Example: compress prune --model torchvision:resnet50 --recipe magnitude_half --workdir out
    """
    check_directory(workdir)
    with err.status("finding the groups and proving them on the example input"):
        pruned = prune_model(models.build(model, weights), recipe, example_inputs=_shape(shape))
    pruned.save(workdir)
    if as_json:
        print(pruned.report.to_json())
    else:
        out.print(pruned.report)
        out.print(f"saved in {workdir}; reload with compress.load(fresh_dense_model, {str(workdir)!r})")


@app.command()
def recipes(
    schema: Annotated[bool, typer.Option("--schema", help="print the JSON schema, for editors")] = False,
) -> None:
    """The recipes that come with the library, a line each."""
    if schema:
        print(json.dumps(Recipe.model_json_schema(), indent=1))
        return
    table = Table("name", "what it does")
    for name, path in packaged().items():
        table.add_row(name, path.read_text().splitlines()[0].removeprefix("# "))
    out.print(table)


@app.command()
def quickstart() -> None:
    """Cut a small residual network before your eyes: dense, zeroed, sliced, reloaded."""
    run_quickstart(out)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run a command; what is wrong is said in red and without a traceback, with exit code 2."""
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        err.print(str(error), style="red", markup=False, highlight=False)
        raise SystemExit(2) from None
