"""A recipe is data: YAML, dict and object are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from compress import Recipe
from compress.recipe import Budget, Target
from compress.search.random import RandomConfig
from helpers.recipe_files import write_recipe

TEXT = """
target:
  residual: true
  exclude: ["re:.*head", stem]
  round_to: 8
budget: {macs: 50%}
search:
  method: random
seed: 3
compensate: mean
"""

DATA = {
    "target": {"residual": True, "exclude": ["re:.*head", "stem"], "round_to": 8},
    "budget": {"macs": "50%"},
    "search": {"method": "random"},
    "seed": 3,
    "compensate": "mean",
}


def test_yaml_dict_and_object_are_the_same(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, TEXT)
    recipe = Recipe(
        target=Target(residual=True, exclude=("re:.*head", "stem"), round_to=8),
        budget=Budget(macs=0.5),
        search=RandomConfig(),
        seed=3,
        compensate="mean",
    )
    assert Recipe.load(path) == Recipe.load(str(path)) == Recipe.load(DATA) == recipe
    assert Recipe.load(recipe) is recipe


def test_recipe_goes_round_through_plain_data() -> None:
    recipe = Recipe.load(DATA)
    assert Recipe.load(recipe.model_dump(mode="json", exclude_none=True)) == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json(exclude_none=True)) == recipe


def test_defaults_are_those_of_the_documentation() -> None:
    recipe = Recipe.load({"budget": {"params": 0.3}})
    assert recipe.target == Target(channels=True, residual=False, attention="auto", round_to="auto", min_keep=2)
    assert Recipe.load({"budget": 0.3, "target": "auto"}).target == recipe.target == Target()
    assert Recipe.load({"budget": 0.3, "target": {"channels": True}}).target.attention is False
    assert (recipe.search.method, recipe.seed, recipe.compensate) == ("magnitude", 0, False)
    assert recipe.budget.limits == {"params": 0.3}


def test_recipe_does_not_change() -> None:
    recipe = Recipe.load(DATA)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.compensate = False
