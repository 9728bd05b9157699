"""Warnings about a search result: groups whose scores are all zero, a budget that cuts nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import compress
from compress.search.result_warnings import warn_about_zero_scores
from helpers.digits import dense, loaders


def test_group_whose_scores_all_reach_zero_keeps_the_least_and_is_named_once() -> None:
    train, val = loaders(count=256)
    search = {"method": "netslim", "epochs": "6 steps", "lr": 0.01, "gamma": 1e4, "proximal": True, "score": "gate"}
    recipe = {
        "budget": "auto",
        "search": search,
        "target": {"include": ["re:stage1.0.*"], "min_keep": 3},
        "timing": {"repeats": 3},
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pruned = compress.prune(dense(), recipe, train=train, val=val, quiet=True)
    said = [str(w.message) for w in caught if "reached zero" in str(w.message)]
    (name,) = pruned.plan.keep
    assert said == [
        f"every score of {name} reached zero: it keeps 3 dimensions (target.min_keep). " + said[0].split(". ")[1]
    ]
    assert said[0] in pruned.report.notes
    assert len(pruned.plan.keep[name]) == 3


@pytest.mark.parametrize(
    ("budget", "kept", "why"),
    [
        ({"macs": "50%"}, (16, 5), r"they keep 16, 5 dimensions \(the budget has room for them\)"),
        ("auto", (4, 4), r"they keep 4, 4 dimensions \(target\.min_keep and round_to\)"),
        ({"macs": "50%"}, (2, 2), r"they keep 2, 2 dimensions \(target\.min_keep\)"),
    ],
)
def test_groups_at_zero_say_what_keeps_them(budget: Any, kept: tuple[int, int], why: str) -> None:
    recipe = compress.Recipe.load({"budget": budget, "search": {"method": "bayes_compress", "epochs": 1}})
    with pytest.warns(UserWarning, match=why):
        warn_about_zero_scores(
            recipe, {"a": torch.zeros(16), "b": torch.zeros(16)}, {"a": range(kept[0]), "b": range(kept[1])}
        )


def test_learned_budget_that_cuts_nothing_says_so() -> None:
    train, val = loaders(count=256)
    search = {"method": "rarts", "epochs": "2 steps", "gamma": 1e-6, "proximal": True}
    with pytest.warns(UserWarning, match=r"no score reached zero, so nothing is pruned: raise search\.gamma"):
        pruned = compress.prune(
            dense(), {"budget": "auto", "search": search, "timing": {"repeats": 3}}, train=train, val=val, quiet=True
        )
    assert pruned.report.pruned.macs == pruned.report.dense.macs
    assert any(note.startswith("no score reached zero") for note in pruned.report.notes)


def test_warning_shows_control_characters_of_names_as_escapes() -> None:
    recipe = compress.Recipe.load({"budget": {"macs": "50%"}, "search": {"method": "netslim", "epochs": 1}})
    with pytest.warns(UserWarning, match=r"every score of a\\x1b\[31m reached zero"):
        warn_about_zero_scores(recipe, {"a\x1b[31m": torch.zeros(4)}, {"a\x1b[31m": range(2)})
