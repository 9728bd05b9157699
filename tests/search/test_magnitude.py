"""Magnitude: the norm of weights as importance."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import compress
from compress.search.base import data_free_importance
from compress.search.magnitude import MagnitudeConfig
from helpers.regression import with_useless_features


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_magnitude_finds_the_planted_channels_in_a_network_that_was_trained(seed: int) -> None:
    model, data, useless = with_useless_features(False, seed)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.2, weight_decay=1e-3)
    for _ in range(20):
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    groups = compress.find_groups(model, data[0][0])
    ranked = data_free_importance(MagnitudeConfig(), model, groups)["0"].argsort().tolist()
    assert set(ranked[:3]) == useless
