"""Read and validate a recipe from YAML or a dict; all problems are reported at once, with file, line and column."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from compress.errors import RecipeError

from .budget_section import Budget
from .fields import StrictModel, parse_fraction
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


class _BudgetAlone(StrictModel):
    """A recipe that is nothing but a budget."""

    budget: Budget


def read_budget(value: float | str | Mapping[str, Any] | Budget, unit: str) -> Budget:
    """Return the budget that a number, a text such as "60%" or "20M", or a dict stands for.

    Args:
        value: a limit in `unit`, or a dict of limits, which is a whole budget.
        unit: of a limit alone; with `auto`, which has none, it is MACs.

    Raises:
        RecipeError: it is not a budget; the message lists all problems.
    """
    if isinstance(value, Budget):
        return value
    limits = value if isinstance(value, Mapping) else {"macs" if unit == "auto" else unit: value}
    try:
        return read_recipe({"budget": limits}, _BudgetAlone).budget
    except RecipeError as error:
        raise RecipeError(str(error).partition("\n  ")[2]) from None
