"""BayesNAS on operations: the group rule against the paper's formulas, the local minimum against brute force."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import compress
from compress.cells import nats_network
from compress.search.bayes.bayesnas_operations import GroupLasso, group_minimum, group_weight
from compress.search.bayes.evidence import ZERO_ENTROPY_VARIANCE
from helpers.choice_networks import conv_choices, images, started


def test_weight_of_a_group_is_that_of_the_paper() -> None:
    torch.manual_seed(0)
    h, gamma = torch.rand(5, 3, dtype=torch.float64) * 4, torch.rand(3, dtype=torch.float64) + 0.1
    c = 1 / (1 / gamma + h)
    a = 1 / gamma - c / gamma**2
    torch.testing.assert_close(group_weight(h, gamma), a.sum(0).sqrt(), rtol=1e-10, atol=1e-10)
    alone = group_weight(h[:1], gamma)  # without sharing, (18)
    torch.testing.assert_close(alone, (gamma - c[0]).sqrt() / gamma, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_minimum_of_a_group_is_that_of_gradient_descent(seed: int) -> None:
    torch.manual_seed(seed)
    w, h = torch.rand(4, 2, dtype=torch.float64) + 0.5, torch.rand(4, 2, dtype=torch.float64) + 0.2
    g = (torch.rand(4, 2, dtype=torch.float64) - 0.5) * h  # within the range that the quadratic model is trusted in
    omega = torch.tensor([0.4, 5.0], dtype=torch.float64)
    x = w.clone()
    for _ in range(4000):  # proximal gradient descent
        x = x - 0.3 * (h * (x - w) + g)
        x = x * (1 - 0.3 * omega / x.norm(dim=0).clamp_min(1e-12)).clamp_min(0)
    torch.testing.assert_close(group_minimum(w, g, h, omega), x.norm(dim=0), rtol=1e-6, atol=1e-6)


def test_group_lasso_shrinks_all_places_of_an_operation_together() -> None:
    places = [nn.Parameter(torch.tensor([3.0, 0.001])), nn.Parameter(torch.tensor([4.0, 0.001]))]
    lasso = GroupLasso({"edge": places}, strength=0.5)
    lasso.omega["edge"].copy_(torch.tensor([2.0, 1.0]))
    optimizer = torch.optim.SGD(places, lr=0.1)
    value = lasso.step_(optimizer, [torch.zeros(2), torch.zeros(2)], 1)
    assert places[0].tolist() == pytest.approx([3 * (1 - 0.1 / 5), 0.0])
    assert places[1].tolist() == pytest.approx([4 * (1 - 0.1 / 5), 0.0])
    assert float(value) == pytest.approx(0.5 * 2 * 4.9)


def test_every_place_has_its_own_weights_and_one_variance() -> None:
    model = conv_choices()
    search = started("bayesnas", model, gamma=0.01)
    assert model.first.free_weights is not model.second.free_weights
    assert [len(p) for p in search.places.values()] == [2, 1]
    assert all(bool((a == 1).all()) for a in search.alpha)
    model.train()
    for batch in images(count=160):
        search.step(batch)
    assert set(search.variance) == {"blocks", "down"}
    strengths = search.importance()
    assert [len(v) for v in strengths.values()] == [3, 2]
    assert all(bool((v > 0).all()) for v in strengths.values())
    assert any("dropped by their entropy" in note for note in search.notes())


def test_operations_without_entropy_are_dropped_but_never_all_of_a_choice() -> None:
    model = conv_choices()
    search = started("bayesnas", model, gamma=0.5, lr=1e-3)
    model.train()
    for batch in images(count=160):
        search.step(batch)
    assert pytest.approx(1 / (2 * math.pi * math.e)) == ZERO_ENTROPY_VARIANCE
    for name, dropped in search.dropped.items():
        assert 0 < int(dropped.sum()) < len(dropped)
        for place in search.places[name]:
            assert not place[dropped > 0].any()


def test_an_edge_that_the_penalty_switches_off_is_none() -> None:
    model = nats_network(2, 1, 4)
    search = started("bayesnas", model, gamma=5.0, lr=0.1)
    model.train()
    for batch in images(count=160):
        search.step(batch)
    assert len(search.switched_off()) == 6
    for strengths in search.importance().values():
        assert int(strengths.argmax()) == 0, "none, the first candidate"
        assert float(strengths[0]) == pytest.approx(ZERO_ENTROPY_VARIANCE)
    note = next(note for note in search.notes() if "switched off" in note)
    assert "6 of 6 choices" in note and "cell.0, cell.1, cell.2, cell.3, ..." in note and "below 5" in note


def test_operations_that_are_switched_off_are_ordered_by_how_long_they_lasted() -> None:
    model = conv_choices()
    search = started("bayesnas", model, gamma=3.0, lr=0.05)
    with torch.no_grad():
        for place in search.places["blocks"]:
            place.copy_(torch.tensor([2.0, 5.0, 3.5]))
    model.train()
    for batch in images(count=160):
        search.step(batch)
    assert "blocks" in search.switched_off()
    assert not search.variance["blocks"].any()
    lasted = search.steps_lasted["blocks"].tolist()
    assert lasted[0] < lasted[2] < lasted[1] < 10
    assert search.importance()["blocks"].argsort().tolist() == [0, 2, 1]


def test_switches_are_gone_after_the_search() -> None:
    recipe = {"target": {"operations": True}, "search": {"method": "bayesnas", "epochs": 2, "lr": 0.1}}
    pruned = compress.prune(conv_choices(), recipe, train=images(), quiet=True)
    names = [*pruned.model.state_dict()]
    assert not any("free_weights" in name or "switch" in name for name in names)
