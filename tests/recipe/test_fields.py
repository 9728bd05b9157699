"""Numbers as people write them: fractions, percentages, lengths, learning rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compress import Recipe, RecipeError
from helpers.recipe_files import write_recipe


@pytest.mark.parametrize(
    ("value", "left"), [("50%", 0.5), (0.5, 0.5), ("12.5%", 0.125), (" 7 %", 0.07), (1, 1.0), ("100%", 1.0)]
)
def test_what_is_left_is_a_fraction_or_a_percentage(value: Any, left: float) -> None:
    assert Recipe.load({"budget": {"macs": value}}).budget.macs == pytest.approx(left)


@pytest.mark.parametrize("value", [0, 0.0, "0%", -0.5, "150%", "half", "%", True, [0.5], float("nan"), "nan%", "inf%"])
def test_other_budgets_are_errors(value: Any) -> None:
    match = r'budget\.macs: expected what is left, as 0 < x <= 1 or "50%", or at most 20M; got '
    with pytest.raises(RecipeError, match=match) as caught:
        Recipe.load({"budget": {"macs": value}})
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("value", [50, 50.0, "50"])
def test_percentage_without_its_sign_is_understood_and_refused(value: Any) -> None:
    with pytest.raises(RecipeError, match=r'budget\.macs: .*; got .*50.*\. Did you mean "50%"\?'):
        Recipe.load({"budget": {"macs": value}})


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
    path = write_recipe(
        tmp_path, "budget: {macs: 50%}\nfinetune: {epochs: 3, lr: 1e-4, weight_decay: 5e-2, warmup: 10%}\n"
    )
    finetune = Recipe.load(path).finetune
    assert finetune is not None
    assert (finetune.lr, finetune.weight_decay, finetune.warmup) == (1e-4, 0.05, 0.1)
    for bad, text in (("fast", "expected a number such as 0.1 or 1e-4"), (-1, "greater than 0"), (0, "greater than 0")):
        with pytest.raises(RecipeError, match=rf"finetune\.lr: .*{text}"):
            Recipe.load({"budget": {"macs": 0.5}, "finetune": {"epochs": 3, "lr": bad}})
    with pytest.raises(RecipeError, match=r'finetune\.warmup: expected a fraction, as 0 <= x <= 1 or "10%"'):
        Recipe.load({"budget": {"macs": 0.5}, "finetune": {"epochs": 3, "warmup": 10}})


def test_length_in_epochs_may_have_bounds_in_steps() -> None:
    recipe = Recipe.load({"budget": 0.5, "finetune": {"epochs": "2 epochs, 50 to 300 steps"}})
    assert [recipe.finetune.epochs.steps(size) for size in (3, 100, 1000)] == [50, 200, 300]  # type: ignore[union-attr]
    assert Recipe.load(recipe.to_dict()) == recipe
    for wrong in ("2 epochs, 300 to 50 steps", "20 steps, 50 to 300 steps", "2 epochs, 50 steps", "a, 5 to 6 steps"):
        with pytest.raises(RecipeError, match=r"finetune\.epochs: expected "):
            Recipe.load({"budget": 0.5, "finetune": {"epochs": wrong}})
