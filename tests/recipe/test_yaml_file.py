"""YAML files: only data, keys once, positions of every key."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress import Recipe, RecipeError
from helpers.recipe_files import write_recipe


def test_error_names_line_and_column(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, "target:\n  residual: true\n\n\nbudget:\n    macs: 50\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml: 1 problem\n  budget\.macs \(line 6, column 5\): "):
        Recipe.load(path)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words\n", "3\n"])
def test_file_without_keys_is_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"recipe\.yaml: expected keys such as budget, target and search; got "):
        Recipe.load(write_recipe(tmp_path, text))


def test_file_that_is_not_yaml_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"(?s)recipe\.yaml: not YAML: .*line 2"):
        Recipe.load(write_recipe(tmp_path, "budget: {macs: 50%\ntarget: }\n"))


def test_key_that_is_given_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="budget"):
        Recipe.load(write_recipe(tmp_path, "budget: {macs: 50%}\nbudget: {macs: 90%}\n"))


def test_keys_that_are_not_words_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="1"):
        Recipe.load(write_recipe(tmp_path, "budget: {macs: 50%}\n1: {a: b}\n"))


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="not YAML"):
        Recipe.load(write_recipe(tmp_path, "budget: !!python/object/apply:os.getcwd []\n"))
