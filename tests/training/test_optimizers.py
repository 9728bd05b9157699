"""Optimizers: weight decay on weights alone, rates by the schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


def test_biases_and_norms_decay_if_the_recipe_says_so() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2))
    optimizer = make_optimizer(training(weight_decay=0.3, decay_norms=True, lr=0.1), model.parameters())
    assert sorted(p.ndim for g in optimizer.param_groups for p in g["params"]) == [1, 1, 1, 4]
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.3}
