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
    match = r'budget\.macs: expected what is left, as 0 < x <= 1 or "50%"; got '
    with pytest.raises(RecipeError, match=match) as caught:
        Recipe.load({"budget": {"macs": value}})
    assert "Did you mean" not in str(caught.value)


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
    with pytest.raises(
        RecipeError, match=r"search\.method: expected one of .*magnitude, .*got 'magnitud'\. Did you mean magnitude\?"
    ):
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
    with pytest.raises(
        RecipeError, match="budget: expected exactly one of macs, params, dims, latency, auto; got macs and params"
    ):
        Recipe.load({"budget": {"macs": 0.5, "params": 0.5}})
    with pytest.raises(
        RecipeError, match="budget: expected exactly one of macs, params, dims, latency, auto; got none"
    ):
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


def test_extends_starts_from_another_recipe(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "budget: {macs: 50%}\nsearch: {method: netslim, epochs: 10, lr: 0.1}\n"
        "finetune: {epochs: 5}\ntarget: {round_to: 8}\n"
    )
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: base.yaml\nsearch: {epochs: 500 steps}\ntarget: {residual: true}\n")
    recipe = Recipe.load(mine)
    assert str(recipe.search.length) == "500 steps"  # type: ignore[union-attr]
    assert recipe.search.lr == 0.1  # type: ignore[attr-defined]
    assert (recipe.target.round_to, recipe.target.residual, recipe.budget.macs) == (8, True, 0.5)
    assert recipe == Recipe.load(
        {"extends": str(tmp_path / "base.yaml"), **{"search": {"epochs": "500 steps"}, "target": {"residual": True}}}
    )


def test_extended_budget_and_method_are_replaced_not_mixed(tmp_path: Path) -> None:
    base = {"extends": "quickstart"}
    other = Recipe.load({**base, "budget": {"params": "30%"}})
    assert (other.budget.unit, other.budget.left) == ("params", 0.3)
    plain = Recipe.load({**base, "search": {"method": "random"}, "finetune": None})
    assert plain.search == RandomConfig()
    assert plain.finetune is None


def test_extends_of_extends_and_of_itself(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\nseed: 1\n")
    (tmp_path / "b.yaml").write_text("extends: c.yaml\nseed: 2\ncompensate: true\n")
    (tmp_path / "c.yaml").write_text("budget: {dims: 0.4}\nseed: 3\n")
    recipe = Recipe.load(tmp_path / "a.yaml")
    assert (recipe.seed, recipe.compensate, recipe.budget.dims) == (1, True, 0.4)
    (tmp_path / "c.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(RecipeError, match=r"a\.yaml: extends itself, by way of .*b\.yaml -> .*c\.yaml -> .*a\.yaml"):
        Recipe.load(tmp_path / "a.yaml")
    with pytest.raises(RecipeError, match=r"extends: expected a recipe's name or path; got 3"):
        Recipe.load({"extends": 3})
    with pytest.raises(RecipeError, match=r"quickstat: expected .*Did you mean quickstart\?"):
        Recipe.load({"extends": "quickstat"})


def test_errors_of_what_is_extended_name_its_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("budget: {macs: 50%}\n\nseach: {method: random}\n")
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: base.yaml\ncompensat: true\n")
    with pytest.raises(RecipeError) as caught:
        Recipe.load(mine)
    assert "seach (line 3, column 1) of " in str(caught.value)
    assert "base.yaml: expected one of" in str(caught.value)
    assert "compensat (line 2, column 1): expected one of" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [(10, "10 epochs"), ("10", "10 epochs"), ("10 epochs", "10 epochs"), ("1 epoch", "1 epochs"), (0.5, "0.5 epochs"),
     ("500 steps", "500 steps"), ("1e3 steps", "1000 steps")],
)  # fmt: skip
def test_lengths_are_epochs_or_steps(value: Any, text: str) -> None:
    recipe = Recipe.load({"budget": {"macs": 0.5}, "finetune": {"epochs": value}})
    assert str(recipe.finetune.epochs) == text  # type: ignore[union-attr]
    assert Recipe.load(recipe.model_dump(mode="json", exclude_none=True)) == recipe


@pytest.mark.parametrize("value", [0, -1, "ten", "5 minutes", "1.5 steps", True, None, [3], "inf", float("nan")])
def test_other_lengths_are_errors(value: Any) -> None:
    with pytest.raises(
        RecipeError, match=r'finetune\.epochs: expected a number of epochs, "10 epochs" or "500 steps"; got'
    ):
        Recipe.load({"budget": {"macs": 0.5}, "finetune": {"epochs": value}})


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    """YAML itself reads 1e-4 as text."""
    path = written(tmp_path, "budget: {macs: 50%}\nfinetune: {epochs: 3, lr: 1e-4, weight_decay: 5e-2, warmup: 10%}\n")
    finetune = Recipe.load(path).finetune
    assert finetune is not None
    assert (finetune.lr, finetune.weight_decay, finetune.warmup) == (1e-4, 0.05, 0.1)
    for bad, text in (("fast", "expected a number such as 0.1 or 1e-4"), (-1, "greater than 0"), (0, "greater than 0")):
        with pytest.raises(RecipeError, match=rf"finetune\.lr: .*{text}"):
            Recipe.load({"budget": {"macs": 0.5}, "finetune": {"epochs": 3, "lr": bad}})
    with pytest.raises(RecipeError, match=r'finetune\.warmup: expected a part of the whole, as 0 <= x <= 1 or "10%"'):
        Recipe.load({"budget": {"macs": 0.5}, "finetune": {"epochs": 3, "warmup": 10}})


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


def test_wrong_words_of_a_choice_are_answered_with_the_nearest(tmp_path: Path) -> None:
    text = "budget: {macs: 50%}\nsearch: {method: netslim, epochs: 3, penalty: macz}\n"
    text += "finetune:\n  epochs: 3\n  schedule: cosin\n"
    with pytest.raises(RecipeError) as caught:
        Recipe.load(written(tmp_path, text))
    assert (
        "search.penalty (line 2, column 38): expected one of l1, macs, latency, l1_split, l0_split; got 'macz'. Did you"
        in str(caught.value)
    )
    assert (
        "finetune.schedule (line 5, column 3): expected one of cosine, step, constant; got 'cosin'. Did you mean c"
        in str(caught.value)
    )
    with pytest.raises(RecipeError, match="search: expected a method and its settings"):
        Recipe.load({"budget": {"macs": 0.5}, "search": "netslim"})
    with pytest.raises(RecipeError, match=r"search\.epochs: required, and missing"):
        Recipe.load({"budget": {"macs": 0.5}, "search": {"method": "netslim"}})
    with pytest.raises(RecipeError, match=r"search\.epochs: expected one of method, ranking; got 'epochs'"):
        Recipe.load({"budget": {"macs": 0.5}, "search": {"method": "magnitude", "epochs": 3}})


@pytest.mark.parametrize("name", packaged())
def test_mutated_recipes_name_the_place(name: str, tmp_path: Path) -> None:
    """Each key of each packaged recipe, misspelt: the error has its line and column."""
    import yaml

    text = packaged()[name].read_text()
    keys = [token for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken)]
    words = {t.value for t in keys if t.value in text and t.value.isidentifier()}
    for token in keys:
        start, end = token.start_mark, token.end_mark
        if not text[end.index :].lstrip().startswith(":") or token.value not in words:
            continue
        broken = text[: start.index] + token.value + "x" + text[end.index :]
        place = rf"\(line {start.line + 1}, column {start.column + 1}\)"
        with pytest.raises(RecipeError, match=rf"{token.value}x {place}: expected one of .*got '{token.value}x'"):
            Recipe.load(written(tmp_path, broken))


def test_other_things_than_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="expected a name, a path, a dict or a Recipe; got NoneType"):
        Recipe.load(None)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="not YAML"):
        Recipe.load(written(tmp_path, "a: &a [*a]\n"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "self.yaml").write_text("extends: sub/../self.yaml\n")
    with pytest.raises(RecipeError, match="extends itself"):
        Recipe.load(tmp_path / "self.yaml")


def test_the_reference_in_the_documents_is_that_of_the_schema() -> None:
    from compress.reference import reference

    written = Path(__file__).parent.parent / "docs" / "recipe.md"
    assert written.read_text() == reference(), "python -m compress.reference > docs/recipe.md"


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        ({"engine": {"precision": "float16"}}, r"engine\.precision: .*; got 'float16'\. Did you mean fp16\?"),
        ({"engine": {"precision": "bfloat16"}}, r"engine\.precision: .*; got 'bfloat16'\. Did you mean bf16\?"),
        ({"finetune": {"epochs": 1, "features": ["a"]}}, r"got 'features'\. It stands in finetune\.distill\."),
        ({"target": {"macs": "50%"}}, r"target\.macs: expected .*; got 'macs'\. It stands in budget\."),
        ({"batch_size": 4}, r"got 'batch_size'\. It stands in timing and data\."),
        ({"search": {"method": "none"}, "finetune": {"epochs": 1, "precision": "fp16"}}, "It stands in engine"),
    ],
)
def test_words_of_other_libraries_and_keys_in_another_section_get_a_hint(recipe: dict[str, Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        Recipe.load({"budget": {"macs": "50%"}} | recipe)
