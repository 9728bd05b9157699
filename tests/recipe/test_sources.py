"""Recipe files: packaged, by path, and extended."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress import Recipe, RecipeError
from compress.recipe import packaged_recipes
from compress.search.random import RandomConfig
from helpers.recipe_files import write_recipe


def test_directory_is_not_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="expected the path of a YAML file or one of the packaged recipes"):
        Recipe.load(tmp_path)


def test_name_that_is_not_packaged_is_answered_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.yaml: expected the path of a YAML file or one of the packaged"):
        Recipe.load("nowhere.yaml")
    name = next(iter(packaged_recipes()))
    with pytest.raises(RecipeError, match=rf"Did you mean {name}\?"):
        Recipe.load(name + "x")


@pytest.mark.parametrize("text", ["10M", "50%%", "-5M", "200 kMACs"])
def test_text_that_is_nearly_a_budget_is_answered_with_one(text: str) -> None:
    with pytest.raises(RecipeError, match=r'or a budget such as "50%"\. For a budget alone, write what is left'):
        Recipe.load(text)


def test_every_packaged_recipe_loads_and_opens_with_its_command() -> None:
    assert packaged_recipes()
    for name, path in packaged_recipes().items():
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
    assert other.budget.limits == {"params": 0.3}
    plain = Recipe.load({**base, "search": {"method": "random"}, "finetune": None})
    assert plain.search == RandomConfig()
    assert plain.finetune is None


def test_extends_of_extends_and_of_itself(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\nseed: 1\n")
    (tmp_path / "b.yaml").write_text("extends: c.yaml\nseed: 2\ncompensate: mean\n")
    (tmp_path / "c.yaml").write_text("budget: {dims: 0.4}\nseed: 3\n")
    recipe = Recipe.load(tmp_path / "a.yaml")
    assert (recipe.seed, recipe.compensate, recipe.budget.dims) == (1, "mean", 0.4)
    (tmp_path / "c.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(RecipeError, match=r"a\.yaml: extends itself through .*b\.yaml -> .*c\.yaml -> .*a\.yaml"):
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


def test_other_things_than_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"expected a name, a path, a dict, a Recipe.* got NoneType"):
        Recipe.load(None)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="not YAML"):
        Recipe.load(write_recipe(tmp_path, "a: &a [*a]\n"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "self.yaml").write_text("extends: sub/../self.yaml\n")
    with pytest.raises(RecipeError, match="extends itself"):
        Recipe.load(tmp_path / "self.yaml")


def test_a_file_in_the_current_directory_does_not_replace_a_packaged_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    packaged = Recipe.load("quickstart")
    Path("quickstart").write_text("budget: {macs: 10%}\ntask: trap:make\n")
    assert Recipe.load("quickstart") == packaged
    assert Recipe.load("./quickstart").task == "trap:make"  # the user says that it is the file


def test_a_long_chain_of_recipes_is_refused_with_its_start(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    with pytest.raises(RecipeError, match=r"0\.yaml -> .*1\.yaml -> .*2\.yaml -> \.\.\.: expected at most 32 recipes"):
        Recipe.load(tmp_path / "0.yaml")
    (tmp_path / "31.yaml").write_text("budget: {macs: 50%}\n")
    assert Recipe.load(tmp_path / "0.yaml").budget.macs == 0.5
