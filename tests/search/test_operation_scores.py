"""Searches over operations: planted candidates, the penalty's formula, the optimizer of the scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import compress
from compress.budget import Operations
from compress.recipe import Timing
from compress.search.score_training.expected_cost import ExpectedCost
from helpers.choice_networks import PlantedNetwork, conv_choices, images, planted_data, started

METHODS: list[dict[str, Any]] = [
    {"method": "rarts"},
    {"method": "rarts", "update": "fused"},
    {"method": "darts1"},
    {"method": "darts2"},
    {"method": "milenas"},
    {"method": "netslim"},
    {"method": "bayesnas"},
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", METHODS, ids=lambda m: "-".join(m.values()))
def test_the_candidate_that_helps_is_chosen(method: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    recipe = {
        "target": {"operations": True},
        "search": {**method, "epochs": "60 steps", "lr": 0.1},
        "seed": seed,
        "timing": {"repeats": 3},
    }
    pruned = compress.prune(PlantedNetwork(), recipe, train=planted_data(seed), quiet=True)
    assert pruned.plan.choices == {"block": "layer"}
    assert isinstance(pruned.model.block, nn.Sequential)


def test_random_draws_its_operations_from_the_seed() -> None:
    def chosen(seed: int) -> str:
        recipe = {"target": {"operations": True}, "search": {"method": "random"}, "seed": seed}
        pruned = compress.prune(PlantedNetwork(), recipe, example_inputs=torch.zeros(2, 8), quiet=True)
        return pruned.plan.choices["block"]

    assert chosen(3) == chosen(3)
    assert {chosen(seed) for seed in range(12)} == {"noise", "layer", "more_noise"}


def test_magnitude_takes_the_scores_as_they_are() -> None:
    model = PlantedNetwork()
    with torch.no_grad():
        model.block.scores.copy_(torch.tensor([0.0, 1.0, 3.0]))
    recipe = {"target": {"operations": True}, "search": {"method": "magnitude"}}
    pruned = compress.prune(model, recipe, example_inputs=torch.zeros(2, 8), quiet=True)
    assert pruned.plan.choices == {"block": "more_noise"}


def test_scores_have_the_optimizer_of_darts_unless_the_recipe_says_otherwise() -> None:
    optimizer = started("darts1", lr=0.025).score_optimizer
    assert type(optimizer) is torch.optim.Adam
    settings = optimizer.param_groups[0]
    assert (settings["lr"], settings["betas"], settings["weight_decay"]) == (3e-4, (0.5, 0.999), 1e-3)
    other = started("rarts", alpha={"lr": 0.01, "optimizer": "sgd", "weight_decay": 0.0}).score_optimizer
    assert type(other) is torch.optim.SGD
    assert other.param_groups[0]["lr"] == 0.01 and other.param_groups[0]["weight_decay"] == 0


def test_shared_scores_are_trained_once_and_are_no_weights() -> None:
    search = started("darts1")
    assert [len(a) for a in search.alpha] == [3, 2]
    assert not {id(a) for a in search.alpha} & {id(w) for w in search.weights}


def test_one_step_of_darts1_moves_the_scores_by_adam_on_the_gradient_of_the_other_half() -> None:
    model = conv_choices().double()
    search = started("darts1", model, lr=1e-9, weight_decay=0.0)
    (xa, ya), (xb, yb) = ((x.double(), y) for x, y in images(count=32))
    model.train()
    loss = nn.functional.cross_entropy(model(xa), ya)
    gradient = torch.autograd.grad(loss, model.down.scores)[0]
    search.step(((xa, ya), (xb, yb)))
    expected = -3e-4 * gradient / (gradient.abs() + 1e-8)  # the first step of Adam; the scores were 0
    torch.testing.assert_close(model.down.scores.detach(), expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("penalty", ["latency", "macs"])
def test_penalty_is_the_expected_cost_of_the_mixture(penalty: str) -> None:
    model = conv_choices().double()
    costs = {"blocks": {"conv3": 5.0, "conv1": 2.0, "skip": 0.5}, "down": {"conv": 1.0, "wide": 3.0}}
    operations = Operations(model, torch.zeros(1, 3, 8, 8), Timing(repeats=3), measured={penalty: costs})
    with torch.no_grad():
        model.first.scores.copy_(torch.tensor([0.3, -0.2, 1.0]))
        model.down.scores.copy_(torch.tensor([0.5, -0.5]))
    config = compress.Recipe.load(
        {"target": {"operations": True}, "search": {"method": "rarts", "epochs": 1, "gamma": 0.002, "penalty": penalty}}
    ).search
    regularizer = ExpectedCost(config, operations.scores, operations)
    unit = 1.0 if penalty == "latency" else 5.0 + 3.0

    def formula() -> torch.Tensor:
        scores = {"blocks": model.first.scores, "down": model.down.scores}
        terms = [
            (a.exp() / a.exp().sum() * torch.tensor([*costs[name].values()], dtype=a.dtype)).sum()
            for name, a in scores.items()
        ]
        return 0.002 * torch.stack(terms).sum() / unit

    assert float(regularizer.value()) == pytest.approx(float(formula().detach()), rel=1e-6)
    gradients = torch.autograd.grad(formula(), [model.first.scores, model.down.scores])
    optimizer = torch.optim.SGD([model.first.scores, model.down.scores], lr=0.1)
    before = model.first.scores.detach().clone()
    regularizer.step_(optimizer, [torch.zeros(3, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)], 1)
    torch.testing.assert_close(model.first.scores.detach(), before - 0.1 * gradients[0], rtol=1e-6, atol=1e-12)


def test_a_strong_penalty_chooses_the_cheapest_candidates() -> None:
    recipe = {
        "target": {"operations": True},
        "search": {"method": "darts1", "epochs": "20 steps", "gamma": 1e4, "penalty": "macs"},
    }
    pruned = compress.prune(conv_choices(), recipe, train=images(), quiet=True)
    assert pruned.plan.choices == {"first": "skip", "second": "skip", "down": "conv"}


def test_importance_is_the_softmax_of_the_scores() -> None:
    model = conv_choices()
    search = started("milenas", model)
    with torch.no_grad():
        model.down.scores.copy_(torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(search.importance()["down"], torch.tensor([1.0, 0.0]).softmax(0))
    torch.testing.assert_close(search.scores()["down"], torch.tensor([1.0, 0.0]).softmax(0))
