"""Taylor importance: the change of the loss to first order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compress
from compress.search.base import Job, search_class
from helpers.bilevel import batch_pair, small_convolutions
from helpers.regression import RegressionTask


def test_taylor_is_the_squared_change_of_the_loss_to_first_order() -> None:
    model = small_convolutions()
    groups = compress.find_groups(model, batch_pair()[0][0])
    cls = search_class("taylor")
    search: Any = cls(cls.Config.model_validate({"method": "taylor"}), Job(model, groups, RegressionTask(), 2))
    before = [p.detach().clone() for p in model.parameters()]
    for batch in batch_pair():
        search.step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for name, values in search.importance().items():
        gate, eps = search.gates[name], 1e-6
        for i in range(0, len(values), 2):
            total = 0.0
            for batch in batch_pair():
                sides = []
                for sign in (1, -1):
                    with torch.no_grad():
                        gate[i] += sign * eps
                        sides.append(float(RegressionTask().loss(model(batch[0]), batch)))
                        gate[i] -= sign * eps
                total += ((sides[0] - sides[1]) / (2 * eps)) ** 2
            assert float(values[i]) == pytest.approx(total, rel=1e-4, abs=1e-10)
