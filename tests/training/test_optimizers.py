"""Optimizers: weight decay on weights alone, rates by the schedule."""

from __future__ import annotations

from typing import Any

import pytest

from compress.recipe import Length, TrainingConfig
from compress.training.lr_schedule import set_lr_
from compress.training.optimizers import make_optimizer
from helpers.digits import dense


def training(**settings: Any) -> TrainingConfig:
    return TrainingConfig(epochs=Length.model_validate(1), **settings)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_weight_decay_is_on_weights_alone_and_rates_follow_the_schedule(kind: str) -> None:
    model = dense()
    scores = [model.stem[1].weight]
    optimizer = make_optimizer(training(optimizer=kind, weight_decay=0.3, lr=0.1), model.parameters(), scores)
    decayed, plain, scored = optimizer.param_groups
    assert {p.ndim for p in decayed["params"]} == {2, 4}
    assert (decayed["weight_decay"], plain["weight_decay"], scored["weight_decay"]) == (0.3, 0, 0.3)
    assert [id(p) for p in scored["params"]] == [id(p) for p in scores]
    count = sum(len(g["params"]) for g in optimizer.param_groups)
    assert count == len(list(model.parameters()))
    set_lr_(optimizer, 0.5)
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.05, 0.05]
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        make_optimizer(training(), model.parameters())
