"""Random importance finds no useless channels: the control for the other searches."""

from __future__ import annotations

import compress
from compress.search.base import data_free_importance
from compress.search.random import RandomConfig
from helpers.regression import with_useless_features


def test_random_scores_do_not_find_the_planted_channels() -> None:
    """The tests of the other searches on these channels would fail for scores that know nothing."""
    found = []
    for seed in range(3):
        model, data, useless = with_useless_features(True, seed)
        groups = compress.find_groups(model, data[0][0])
        ranked = data_free_importance(RandomConfig(), model, groups, seed)["0"].argsort().tolist()
        found.append(set(ranked[:3]) == useless)
    assert not all(found)
