"""Patterns of names match what `re` matches, in bounded time."""

from __future__ import annotations

import random
import re
import threading

import pytest
import torch
from torch import nn

import compress
from compress.recipe import Recipe
from compress.recipe.name_patterns import NamePattern, _SetMatcher, parser

HANGING = r"re:(\w*\.?\w*\.?)*!"
LONG_NAME = "encoder.layers.11.attention.output.dense.of.a.long.name"
ATOMS = ["a", "b", "1", ".", "^", "$", *(rf"\{c}" for c in ".wWdDsbB"), "[ab]", "[^a]", "[a-b1]", r"[^\w.]"]
REPEATS = ["*", "+", "?", "*?", "+?", "{2}", "{1,2}", "{0}", "{,3}", "{2,}"]


def random_expression(source: random.Random, depth: int) -> str:
    kind = source.choice(["atom", "sequence", "branch", "repeat", "look", "flag"]) if depth else "atom"
    if kind == "atom":
        return source.choice(ATOMS)
    first, second = random_expression(source, depth - 1), random_expression(source, depth - 1)
    return {
        "sequence": f"{first}{second}",
        "branch": f"(?:{first}|{second})",
        "repeat": f"({first}){source.choice(REPEATS)}",
        "look": f"(?{source.choice('=!')}{first}){second}",
        "flag": f"(?i:{first}){second}",
    }[kind]


def test_sets_of_positions_match_what_re_matches() -> None:
    source = random.Random(0)
    num_matches = 0
    for _ in range(3000):
        expression = random_expression(source, source.randint(1, 4))
        compiled = re.compile(expression)
        for _ in range(5):
            name = "".join(source.choice("aAb1.!") for _ in range(source.randint(1, 6)))
            expected = compiled.fullmatch(name) is not None
            ends = _SetMatcher(name).sequence_ends(parser.parse(expression), 0, compiled.flags)
            assert (len(name) in ends) == expected, (expression, name)
            assert NamePattern(f"re:{expression}").matches(name) == expected, (expression, name)
            num_matches += expected
    assert num_matches > 500


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        (HANGING, LONG_NAME, False),
        (HANGING, f"{LONG_NAME}!", True),
        (r"re:(a|a|\w|.)*!", LONG_NAME, False),
        ("re:" + ".*" * 12 + "!", LONG_NAME, False),
        ("re:" + "(" * 20 + r"\w*" + ")*" * 20 + "!", LONG_NAME, False),
        (r"re:((\w{1,9}){1,9}){1000000}!", LONG_NAME, False),
        (r"re:(\w+\.)*dense(\.\w+)*", LONG_NAME, True),
        (r"re:(?!head)(\w+\.?)+", LONG_NAME, True),
        (r"re:(?!encoder)(\w+\.?)+", LONG_NAME, False),
        (r"re:(layer\d)\.\1", "layer1.layer1", True),
        ("layer.0", "layer.0", True),
        ("layer.0", "layer10", False),
    ],
)
def test_expressions_that_can_be_matched_in_many_ways_come_to_an_end(pattern: str, name: str, expected: bool) -> None:
    assert NamePattern(pattern).matches(name) == expected


@pytest.mark.parametrize(
    ("expression", "part"),
    [
        (r"(a*)*\1", "references to groups"),
        (r"(?<=a)(a*)*b", "looking behind"),
        ("(" * 60 + "a*" + ")*" * 60, "more than 50 nested parentheses"),
    ],
)
def test_expression_that_cannot_be_bounded_is_refused_with_its_place(expression: str, part: str) -> None:
    text = rf"target\.exclude\.0: .* may take forever to match: .* without {part}\. Simplify it, or list the names"
    with pytest.raises(compress.RecipeError, match=text):
        Recipe.load({"budget": {"macs": "50%"}, "target": {"exclude": [f"re:{expression}"]}})
    with pytest.raises(ValueError, match=f"without {part}"):
        NamePattern(f"re:{expression}")


def test_expression_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"'re:\(a' is not a regular expression: missing \)"):
        NamePattern("re:(a")


def test_preview_comes_to_an_end_in_any_thread() -> None:
    model = nn.Sequential()
    for i, width in enumerate([8, 8, 4]):
        model.add_module(f"a_rather_long_name_of_a_convolution_{i}", nn.Conv2d(3 if i == 0 else 8, width, 1))
    errors: list[str] = []

    def preview(target: dict[str, object]) -> None:
        recipe = {"budget": {"macs": "50%"}, "target": target}
        try:
            compress.preview(model, recipe, example_inputs=torch.randn(1, 3, 4, 4))
        except ValueError as error:
            errors.append(str(error))

    bounded: dict[str, object] = {"bounds": {HANGING: {"least": 2}}}
    for target in ({"exclude": [HANGING]}, {"include": [HANGING]}, bounded):
        thread = threading.Thread(target=preview, args=(target,))
        thread.start()
        thread.join()
    assert [error.partition(":")[0] for error in errors] == ["target.exclude", "target.include", "target.bounds"]
    assert all("matches no" in error for error in errors)
