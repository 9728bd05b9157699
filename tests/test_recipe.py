"""A recipe is data; what is wrong in it is said at once, with the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from compress import Recipe, RecipeError
from compress.reading import packaged
from compress.recipe import Budget, Target
from compress.search.random import RandomConfig

TEXT = """
target:
  residual: true
  exclude: ["re:.*head", stem]
  round_to: 8
budget: {macs: 50%}
search:
  method: random
seed: 3
compensate: true
"""

DATA = {
    "target": {"residual": True, "exclude": ["re:.*head", "stem"], "round_to": 8},
    "budget": {"macs": "50%"},
    "search": {"method": "random"},
    "seed": 3,
    "compensate": True,
}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_yaml_dict_and_object_are_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    recipe = Recipe(
        target=Target(residual=True, exclude=("re:.*head", "stem"), round_to=8),
        budget=Budget(macs=0.5),
        search=RandomConfig(),
        seed=3,
        compensate=True,
    )
    assert Recipe.load(path) == Recipe.load(str(path)) == Recipe.load(DATA) == recipe
    assert Recipe.load(recipe) is recipe


def test_recipe_goes_round_through_plain_data() -> None:
    recipe = Recipe.load(DATA)
    assert Recipe.load(recipe.model_dump(mode="json", exclude_none=True)) == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json(exclude_none=True)) == recipe


def test_defaults_are_those_of_the_documentation() -> None:
    recipe = Recipe.load({"budget": {"params": 0.3}})
    assert recipe.target == Target(channels=True, residual=False, attention=False, round_to=1, min_keep=2)
    assert (recipe.search.method, recipe.seed, recipe.compensate) == ("magnitude", 0, False)
    assert (recipe.budget.unit, recipe.budget.left) == ("params", 0.3)


@pytest.mark.parametrize(
    ("value", "left"), [("50%", 0.5), (0.5, 0.5), ("12.5%", 0.125), (" 7 %", 0.07), (1, 1.0), ("100%", 1.0)]
)
def test_what_is_left_is_a_fraction_or_a_percentage(value: Any, left: float) -> None:
    assert Recipe.load({"budget": {"macs": value}}).budget.left == pytest.approx(left)


@pytest.mark.parametrize("value", [0, 0.0, "0%", -0.5, "150%", "half", "%", True, [0.5], float("nan"), "nan%", "inf%"])
def test_other_budgets_are_errors(value: Any) -> None:
    with pytest.raises(RecipeError, match=r'budget\.macs: expected what is left, as 0 < x <= 1 or "50%"; got '):
        Recipe.load({"budget": {"macs": value}})


@pytest.mark.parametrize("value", [50, 50.0, "50"])
def test_percentage_without_its_sign_is_understood_and_refused(value: Any) -> None:
    with pytest.raises(RecipeError, match=r'budget\.macs: .*; got .*50.*\. Did you mean "50%"\?'):
        Recipe.load({"budget": {"macs": value}})


def test_error_names_line_and_column(tmp_path: Path) -> None:
    path = written(tmp_path, "target:\n  residual: true\n\n\nbudget:\n    macs: 50\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml: 1 thing to mend\n  budget\.macs \(line 6, column 5\): "):
        Recipe.load(path)


def test_unknown_word_is_answered_with_the_nearest(tmp_path: Path) -> None:
    path = written(tmp_path, "budget: {macs: 50%}\ntarget:\n  residuals: true\n")
    match = r"target\.residuals \(line 3, column 3\): expected one of channels, residual, .*Did you mean residual\?"
    with pytest.raises(RecipeError, match=match):
        Recipe.load(path)
    with pytest.raises(RecipeError, match=r"bugdet: expected one of .*Did you mean budget\?"):
        Recipe.load({"bugdet": {"macs": 0.5}})
    with pytest.raises(RecipeError, match=r"search\.method: expected one of magnitude, .*got 'magnitud'\. Did you mean magnitude\?"):
        Recipe.load({"budget": {"macs": 0.5}, "search": {"method": "magnitud"}})


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    text = "budget: {macs: 50}\ntarget: {round_to: 0, min_keep: two, chanels: true}\ncompensate: maybe\n"
    with pytest.raises(RecipeError) as caught:
        Recipe.load(written(tmp_path, text))
    message = str(caught.value)
    assert "5 things to mend" in message
    for part in (
        "budget.macs (line 1, column 10)",
        "target.round_to (line 2, column 10): input should be greater than or equal to 1; got 0",
        "target.min_keep (line 2, column 23)",
        "target.chanels (line 2, column 38)",
        "compensate (line 3, column 1)",
    ):
        assert part in message, message


def test_types_are_strict() -> None:
    for target in ({"residual": 1}, {"residual": "yes"}, {"round_to": 2.0}, {"round_to": True}, {"exclude": "stem"}):
        with pytest.raises(RecipeError, match=rf"target\.{next(iter(target))}: "):
            Recipe.load({"budget": {"macs": 0.5}, "target": target})


def test_budget_is_exactly_one() -> None:
    with pytest.raises(RecipeError, match="budget: expected exactly one of macs, params, dims, latency; got macs and params"):
        Recipe.load({"budget": {"macs": 0.5, "params": 0.5}})
    with pytest.raises(RecipeError, match="budget: expected exactly one of macs, params, dims, latency; got none"):
        Recipe.load({"budget": {}})
    with pytest.raises(RecipeError, match="budget: required, and missing"):
        Recipe.load({})


def test_recipe_does_not_change() -> None:
    recipe = Recipe.load(DATA)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.compensate = False


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words\n", "3\n"])
def test_file_without_keys_is_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"recipe\.yaml: expected keys such as budget, target and search; got "):
        Recipe.load(written(tmp_path, text))


def test_file_that_is_not_yaml_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"(?s)recipe\.yaml: not YAML: .*line 2"):
        Recipe.load(written(tmp_path, "budget: {macs: 50%\ntarget: }\n"))


def test_key_that_is_given_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="budget"):
        Recipe.load(written(tmp_path, "budget: {macs: 50%}\nbudget: {macs: 90%}\n"))


def test_keys_that_are_not_words_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="1"):
        Recipe.load(written(tmp_path, "budget: {macs: 50%}\n1: {a: b}\n"))


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="not YAML"):
        Recipe.load(written(tmp_path, "budget: !!python/object/apply:os.getcwd []\n"))


def test_directory_is_not_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="expected the path of a YAML file or one of the packaged recipes"):
        Recipe.load(tmp_path)


def test_name_that_is_not_packaged_is_answered_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.yaml: expected the path of a YAML file or one of the packaged"):
        Recipe.load("nowhere.yaml")
    name = next(iter(packaged()))
    with pytest.raises(RecipeError, match=rf"Did you mean {name}\?"):
        Recipe.load(name + "x")


def test_every_packaged_recipe_loads_and_opens_with_its_command() -> None:
    assert packaged()
    for name, path in packaged().items():
        assert isinstance(Recipe.load(name), Recipe)
        assert path.read_text().startswith("#"), name
