"""A target selects groups by kind, by name and by expression."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compress
from cases import CASES, build, example
from compress.recipe import Target
from helpers.block_network import HALF_MACS, block_network


def test_include_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"target\.include: '1\.conv3' matches no module of the model; .*1\.conv"):
        compress.find_groups(block_network(), torch.randn(1, 3, 8, 8), Target(include=("1.conv3",)))


def test_exclude_that_matches_nothing_names_the_nearest() -> None:
    recipe = HALF_MACS | {"target": {"exclude": ["re:1.con"]}}
    match = r"target\.exclude: 're:1\.con' matches no module of the model; the nearest names are .*1\.conv1"
    with pytest.raises(ValueError, match=match):
        compress.prune(block_network(), recipe, example_inputs=torch.randn(1, 3, 8, 8))


def test_expression_that_is_wrong_is_named() -> None:
    """When the recipe is read, not when the groups are known."""
    for target in ({"exclude": ["re:(head"]}, {"include": ["re:(head"]}, {"bounds": {"re:(head": {"least": 2}}}):
        with pytest.raises(compress.RecipeError, match=r"target\.[a-z.0(:]*: 're:\(head' is not a regular expression"):
            compress.Recipe.load(HALF_MACS | {"target": target})


def names(**target: Any) -> list[str]:
    case = CASES["residual_stream"]
    return [g.name for g in compress.find_groups(build(case), example(case), Target(**target))]


def test_target_says_which_groups_are_offered() -> None:
    assert names() == ["1.conv1", "2.conv1"]
    assert names(residual=True) == ["0.0", "1.conv1", "2.conv1"]
    assert names(residual=True, channels=False) == ["0.0"]
    assert names(channels=False) == []
    assert names(include=("1",)) == ["1.conv1"]
    assert names(include=("1", "re:2.*")) == ["1.conv1", "2.conv1"]
    assert names(exclude=("re:.*conv1",)) == []
    assert names(include=("1",), exclude=("1.conv1",)) == []
    assert names(residual=True, exclude=("2.conv2",)) == ["1.conv1", "2.conv1"]


def test_what_the_target_leaves_out_is_refused_with_that_reason() -> None:
    case = CASES["residual_stream"]
    groups = compress.find_groups(build(case), example(case), Target(exclude=("1.conv1",)))
    reasons = {r.name: r.reason for r in groups.refused}
    assert reasons.items() >= {"0.0": "target.residual is off", "1.conv1": "in target.exclude"}.items()
