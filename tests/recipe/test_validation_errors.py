"""Problems of a recipe: all at once, each with its place and the nearest word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compress import Recipe, RecipeError
from compress.recipe import packaged_recipes
from helpers.recipe_files import write_recipe


def test_unknown_word_is_answered_with_the_nearest(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, "budget: {macs: 50%}\ntarget:\n  residuals: true\n")
    match = r"target\.residuals \(line 3, column 3\): expected one of channels, residual, .*Did you mean residual\?"
    with pytest.raises(RecipeError, match=match):
        Recipe.load(path)
    with pytest.raises(RecipeError, match=r"bugdet: expected one of .*Did you mean budget\?"):
        Recipe.load({"bugdet": {"macs": 0.5}})
    with pytest.raises(
        RecipeError, match=r"search\.method: expected one of .*magnitude, .*got 'magnitud'\. Did you mean magnitude\?"
    ):
        Recipe.load({"budget": {"macs": 0.5}, "search": {"method": "magnitud"}})


def test_all_problems_of_a_recipe_are_reported_at_once(tmp_path: Path) -> None:
    text = "budget: {macs: 50}\ntarget: {round_to: 0, min_keep: two, chanels: true}\ncompensate: maybe\n"
    with pytest.raises(RecipeError) as caught:
        Recipe.load(write_recipe(tmp_path, text))
    message = str(caught.value)
    assert "5 problems" in message
    for part in (
        "budget.macs (line 1, column 10)",
        "target.round_to (line 2, column 10): expected auto, or a number of dimensions such as 8; got 0",
        "target.min_keep (line 2, column 23)",
        "target.chanels (line 2, column 38)",
        "compensate (line 3, column 1)",
    ):
        assert part in message, message


def test_wrong_words_of_a_choice_are_answered_with_the_nearest(tmp_path: Path) -> None:
    text = "budget: {macs: 50%}\nsearch: {method: netslim, epochs: 3, penalty: macz}\n"
    text += "finetune:\n  epochs: 3\n  schedule: cosin\n"
    with pytest.raises(RecipeError) as caught:
        Recipe.load(write_recipe(tmp_path, text))
    assert (
        "penalty (line 2, column 38): expected one of l1, macs, latency, l1_split, l0_split, tl1_split; got 'macz'."
        in str(caught.value)
    )
    assert (
        "finetune.schedule (line 5, column 3): expected one of cosine, step, constant; got 'cosin'. Did you mean c"
        in str(caught.value)
    )
    with pytest.raises(RecipeError, match="search: expected a method, as netslim, or one with settings"):
        Recipe.load({"budget": {"macs": 0.5}, "search": ["netslim"]})
    with pytest.raises(RecipeError, match=r"search\.method: expected one of .*; got 'netslm'\. Did you mean netslim"):
        Recipe.load({"budget": {"macs": 0.5}, "search": "netslm"})
    with pytest.raises(RecipeError, match=r"search\.epochs: expected one of method, ranking; got 'epochs'"):
        Recipe.load({"budget": {"macs": 0.5}, "search": {"method": "magnitude", "epochs": 3}})


@pytest.mark.parametrize("name", packaged_recipes())
def test_mutated_recipes_name_the_place(name: str, tmp_path: Path) -> None:
    """Each key of each packaged recipe, misspelt: the error has its line and column."""
    import yaml

    text = packaged_recipes()[name].read_text()
    keys = [token for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken)]
    words = {t.value for t in keys if t.value in text and t.value.isidentifier()}
    for token in keys:
        start, end = token.start_mark, token.end_mark
        if not text[end.index :].lstrip().startswith(":") or token.value not in words:
            continue
        broken = text[: start.index] + token.value + "x" + text[end.index :]
        place = rf"\(line {start.line + 1}, column {start.column + 1}\)"
        with pytest.raises(RecipeError, match=rf"{token.value}x {place}: expected one of .*got '{token.value}x'"):
            Recipe.load(write_recipe(tmp_path, broken))


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        ({"engine": {"precision": "float16"}}, r"engine\.precision: .*; got 'float16'\. Did you mean fp16\?"),
        ({"engine": {"precision": "bfloat16"}}, r"engine\.precision: .*; got 'bfloat16'\. Did you mean bf16\?"),
        ({"finetune": {"epochs": 1, "features": ["a"]}}, r"got 'features'\. It belongs to finetune\.distill\."),
        ({"target": {"macs": "50%"}}, r"target\.macs: expected .*; got 'macs'\. It belongs to budget\."),
        ({"batch_size": 4}, r"got 'batch_size'\. It belongs to timing and data\."),
        ({"search": {"method": "none"}, "finetune": {"epochs": 1, "precision": "fp16"}}, "It belongs to engine"),
    ],
)
def test_words_of_other_libraries_and_keys_in_another_section_get_a_hint(recipe: dict[str, Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        Recipe.load({"budget": {"macs": "50%"}} | recipe)


@pytest.mark.parametrize(
    ("search", "match"),
    [
        ({"epochs": 3}, "search.epochs: .* Without a method it is magnitude, .* write method: netslim"),
        ({"method": "magnitude", "epochs": 3}, "magnitude has no epochs. .* aps, .*taylor: write method: netslim"),
        ({"method": "taylor", "costs": True}, "search.costs: .* taylor has no costs. .* bayesnas,"),
        ({"method": "netslim", "hessian": "paper"}, "netslim has no hessian. .* bayesnas: write method: bayes"),
        ({"method": "RARTS"}, "got 'RARTS'. Did you mean rarts"),
    ],
)
def test_setting_of_another_search_names_the_searches_that_have_it(search: dict[str, Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match) as caught:
        Recipe.load({"budget": 0.5, "search": search})
    assert "belongs to finetune" not in str(caught.value)


def test_operations_with_a_search_that_cannot_is_one_problem() -> None:
    for method in ("rvsm", "bayes_compress"):
        with pytest.raises(RecipeError, match=r"1 problem\n  search: target.operations needs a search that trains"):
            Recipe.load({"target": {"operations": True}, "search": method})


def test_length_in_steps_is_explained() -> None:
    budget = {"macs": 0.5}
    with pytest.raises(RecipeError, match=r"search\.steps: .*A length in steps is written as epochs: 20 steps\."):
        Recipe.load({"budget": budget, "search": {"method": "netslim", "steps": 20}})
    with pytest.raises(RecipeError, match=r"finetune\.max_steps: .*written as epochs: 300 steps\."):
        Recipe.load({"budget": budget, "finetune": {"max_steps": "many"}})
    assert Recipe.load({"budget": budget, "finetune": {"epochs": "20 steps"}}).finetune.epochs.steps(None) == 20
    with pytest.raises(RecipeError) as caught:  # magnitude has no length
        Recipe.load({"budget": budget, "search": {"method": "magnitude", "steps": 20}})
    assert "A length in steps" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {"search": {"method": "aps", "epochs": 1, "candidates": [0]}},
            "search.candidates.0: expected a number of dimensions such as 8, or a fraction of the dense width such as "
            '"25%"; got 0',
        ),
        (
            {"search": {"method": "aps", "epochs": 1, "candidates": []}},
            "search.candidates: expected a list of at least 1; got []",
        ),
        ({"target": {"mlp": "before"}}, "target.mlp: expected one of true, false, before_activation; got 'before'."),
    ],
)
def test_a_wrong_value_is_one_problem(section: dict[str, Any], expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.load({"budget": {"macs": 0.5}, **section})
    assert str(caught.value) == f"recipe: 1 problem\n  {expected}"
