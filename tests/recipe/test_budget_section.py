"""Budgets as people write them: fractions, absolute amounts, several at once, and the words of other libraries."""

from __future__ import annotations

import re
from typing import Any

import pytest

from compress import Recipe, RecipeError
from compress.recipe import Budget, Quantity, read_budget


def budget_of(value: Any) -> Budget:
    return Recipe.load({"budget": value}).budget


@pytest.mark.parametrize(
    ("unit", "value", "amount"),
    [
        ("macs", "20M", 20e6),
        ("macs", "1.5 G", 1.5e9),
        ("macs", 20_000_000, 20e6),
        ("params", "3M", 3e6),
        ("params", "750k", 750e3),
        ("dims", 500, 500),
        ("size", "10 MB", 10e6),
        ("size", "10MiB", 10 * 2**20),
        ("size", "900 kB", 900e3),
        ("latency", "5 ms", 5),
        ("latency", "0.5ms", 0.5),
        ("latency", "0.02 s", 20),
        ("latency", "800 us", 0.8),
    ],
)
def test_absolute_limits_are_amounts_in_the_units_of_people(unit: str, value: Any, amount: float) -> None:
    limit = budget_of({unit: value}).limits[unit]
    assert isinstance(limit, Quantity) and limit.amount == pytest.approx(amount)


def test_budgets_are_read_again_as_they_are_written() -> None:
    for value in ({"macs": "20M", "params": "40%", "latency": "5 ms", "size": "10 MB"}, "50%", 0.5, "auto"):
        recipe = {"budget": value, "search": {"method": "netslim", "epochs": 1, "gamma": 1e-3, "proximal": True}}
        loaded = Recipe.load(recipe)
        assert Recipe.load(loaded.model_dump(mode="json", exclude_none=True)) == loaded


def test_bare_fraction_is_a_budget_of_macs() -> None:
    assert budget_of("50%") == budget_of(0.5) == budget_of({"macs": "50%"})


def test_several_limits_stand_in_the_order_of_the_units() -> None:
    budget = budget_of({"latency": "60%", "params": "40%", "macs": "20M"})
    assert str(budget) == "macs 20M, params 40%, latency 60%"
    assert budget.is_measured and budget.computed_units == ("macs", "params")


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({}, "budget: expected auto alone, or one or more of macs, params, dims, size, latency; got none"),
        ({"auto": True, "macs": 0.5}, "budget: expected auto alone, or .*; got macs and auto"),
        ({"macs": 50}, r'budget.macs: .* at most 20M; got 50\. Did you mean "50%"\?'),
        ({"latency": 5}, r'budget.latency: .* at most "5 ms"; got 5\. Did you mean "5%" or "5 ms"\?'),
        ({"size": "10M"}, r'budget.size: .* at most "10 MB"; got \'10M\''),
        ({"macs": "5 ms"}, "budget.macs: expected what is left"),
        ("20M", r"budget: expected auto, or .*; got '20M'\. Did you mean \{macs: 20M\} or \{params: 20M\}\?"),
        (50, r'budget: expected auto, or .*; got 50\. Did you mean "50%"\?'),
        ("half", "budget: expected auto, or what is left, as 50% "),
        (True, "budget: expected a section with some of macs, params"),
    ],
)
def test_other_budgets_are_explained(budget: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        budget_of(budget)


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [
        ("flops", "40M", "{macs: 20M}"),
        ("flops", "50%", "{macs: 50%}"),
        ("gflops", 4, "{macs: 2G}"),
        ("sparsity", 0.3, "{dims: 70%}, of the channels, or {macs: 70%}"),
        ("pruning_ratio", "80%", "{dims: 20%}, of the channels, or {macs: 20%}"),
        ("ratio", "much", "{dims: 50%}"),
        ("speedup", "2x", "{latency: 50%}, measured, or {macs: 50%}, counted"),
        ("speedup", 4, "{latency: 25%}"),
        ("parameters", "3M", "params"),
        ("time", "3 ms", "latency"),
    ],
)
def test_words_of_other_libraries_are_translated(key: str, value: Any, ours: str) -> None:
    with pytest.raises(
        RecipeError, match=rf"budget\.{key}: .*Did you mean {re.escape(ours)}.* A budget says what is left"
    ):
        budget_of({key: value})
    if key in ("sparsity", "speedup", "flops"):
        with pytest.raises(RecipeError, match=rf"{key}: .* It belongs to budget\. Did you mean {re.escape(ours)}"):
            Recipe.load({"budget": 0.5, key: value})


def test_limit_beside_auto_is_reported_with_a_limit_that_is_invalid() -> None:
    with pytest.raises(RecipeError, match=r"2 problems\n  budget.macs: .*\n  budget: expected auto alone"):
        budget_of({"auto": True, "macs": 7})


def test_budget_is_required_and_replaces_that_of_the_base() -> None:
    with pytest.raises(RecipeError, match="budget: required but missing"):
        Recipe.load({})
    extended = Recipe.load({"extends": "magnitude_half", "budget": {"params": "3M", "latency": "60%"}}).budget
    assert str(extended) == "params 3M, latency 60%"


def test_budget_alone_is_explained_like_that_of_a_recipe() -> None:
    assert read_budget("60%", "params") == budget_of({"params": 0.6})
    assert read_budget("60%", "auto") == read_budget({"macs": 0.6}, "dims") == budget_of({"macs": 0.6})
    for wrong, match in (
        ({"mac": 0.5}, r"^budget\.mac: expected one of macs, .*; got 'mac'\. Did you mean macs\?"),
        ({"MACs": 0.5}, r"^budget\.MACs: .* Did you mean macs\?"),
        (40, r'^budget\.size: .*got 40\. Did you mean "40%" or "40 MB"\?'),
        ({}, "^budget: expected auto alone, or one or more of"),
    ):
        with pytest.raises(RecipeError, match=match):
            read_budget(wrong, "size")
