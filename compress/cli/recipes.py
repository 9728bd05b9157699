"""compress recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from compress.recipe import Recipe, packaged_recipes

from .options import JsonOption, console


def recipes(
    name: Annotated[str | None, typer.Argument(help="print this recipe")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="print the JSON schema, for editors")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the packaged recipes; with a name, print that recipe.

    Examples: compress recipes, compress recipes quickstart > mine.yaml, compress recipes --schema > schema.json
    """
    files = packaged_recipes()
    titles = {name: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for name, path in files.items()}
    if schema:
        print(json.dumps(Recipe.schema_for_editors(), indent=1))
    elif name is not None:
        Recipe.load(name)  # an error if there is no such recipe, or it is invalid
        print(files.get(name, Path(name)).read_text(encoding="utf-8"), end="")
    elif as_json:
        print(json.dumps(titles, indent=1))
    else:
        table = Table("name", "purpose")
        for recipe_name, title in titles.items():
            table.add_row(recipe_name, title)
        console.print(table)
