"""Read and validate a recipe from YAML or a dict; all problems are reported at once, with file, line and column."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from compress.errors import RecipeError

from .fields import parse_fraction
from .sources import Source, gather
from .validation_errors import ErrorExplainer

Schema = TypeVar("Schema", bound=BaseModel)


def read_recipe(source: Source | float, schema: type[Schema]) -> Schema:
    """Read a recipe from a packaged name, a path, a dict or a budget alone, and validate it.

    Raises:
        RecipeError: no such recipe, or the recipe is invalid; the message lists all problems.
    """
    if parse_fraction(source) is not None:
        source = {"budget": source}
    if not isinstance(source, (str, Path, Mapping)):
        raise RecipeError(
            f'recipe: expected a name, a path, a dict, a Recipe, or a budget such as "50%"; got {type(source).__name__}'
        )
    data = gather(source)
    problems = data.problems
    try:
        recipe = schema.model_validate(data.values)
    except ValidationError as error:
        problems = [*problems, *ErrorExplainer(schema, data).explain(error)]
    if not problems:
        return recipe
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise RecipeError(f"{data.origin}: {count}\n  " + "\n  ".join(dict.fromkeys(problems)))
