"""Sections of a recipe: strict types, bounds."""

from __future__ import annotations

import pytest

from compress import Recipe, RecipeError


def test_types_are_strict() -> None:
    for target in ({"residual": 1}, {"residual": "yes"}, {"round_to": 2.0}, {"round_to": True}, {"exclude": "stem"}):
        with pytest.raises(RecipeError, match=rf"target\.{next(iter(target))}: "):
            Recipe.load({"budget": {"macs": 0.5}, "target": target})


def test_bounds_are_dimensions_or_parts() -> None:
    bounds = {"a": {"least": 8, "most": "50%"}, "re:b.*": {"most": 0.25}}
    recipe = Recipe.load({"budget": {"macs": 0.5}, "target": {"bounds": bounds}})
    assert (recipe.target.bounds["a"].least, recipe.target.bounds["a"].most) == (8, 0.5)
    for bad, text in (
        ({"least": 0}, "expected a number of dimensions such as 8"),
        ({}, "expected least, most or both; got none"),
        ({"least": 9, "most": 3}, "expected least <= most; got 9 and 3"),
        ({"fewest": 3}, "expected one of least, most; got 'fewest'"),
    ):
        with pytest.raises(RecipeError, match=rf"target\.bounds\.a.*{text}"):
            Recipe.load({"budget": {"macs": 0.5}, "target": {"bounds": {"a": bad}}})
