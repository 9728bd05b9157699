"""The structures of bayes_compress: which slices of a weight form a group."""

from __future__ import annotations

import pytest
import torch

from compress.search.bayes.structures import STRUCTURES, group_families


@pytest.mark.parametrize(
    ("shape", "fitting"),
    [
        ((4, 3, 3, 3), set(STRUCTURES)),
        ((4, 3), {"shape", "row", "column", "row_column", "channel", "filter"}),
        ((4, 3, 1, 1), {"shape", "row", "column", "row_column", "channel", "filter"}),
        ((4, 3, 5), set(STRUCTURES) - {"group_row", "group_row_column"}),
        ((1, 1, 3, 3), set(STRUCTURES) - {"channel", "filter"}),
    ],
)
def test_structures_fit_layers_that_have_several_groups(shape: tuple[int, ...], fitting: set[str]) -> None:
    assert {s for s in STRUCTURES if group_families(s, torch.zeros(shape))} == fitting
