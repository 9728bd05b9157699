"""A copy that moves in the plane: exact at every point, and apart from the original."""

from __future__ import annotations

import torch
from torch import nn

from compress.diagnostics.perturbed_network import PerturbedNetwork
from helpers.snapshots import same_snapshot, snapshot


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Dropout())


def test_weights_are_those_of_the_point_however_it_was_reached() -> None:
    model = network()
    one, two = ({"0.weight": torch.randn(3, 2, 1, 1)} for _ in range(2))
    perturbed = PerturbedNetwork("model", model, (one, two), torch.device("cpu"))
    weight = model[0].weight.detach().clone()
    for a, b in [(0.3, -0.7), (-1, 1), (0, 0), (0.25, 0.5)]:
        perturbed.move_to_(a, b)
        expected = weight + a * one["0.weight"] + b * two["0.weight"]
        assert torch.allclose(perturbed.model[0].weight, expected, rtol=0, atol=1e-6)
    perturbed.move_to_(0, 0)
    assert torch.equal(perturbed.model[0].weight, weight)
    assert torch.equal(perturbed.model[1].weight, model[1].weight)


def test_buffers_that_the_model_updates_start_anew_at_each_point() -> None:
    model = network()
    perturbed = PerturbedNetwork("model", model, ({}, {}), torch.device("cpu"))
    for buffer in perturbed.model.buffers():
        buffer.add_(1)
    perturbed.move_to_(0.5, 0.5)
    for moved, original in zip(perturbed.model.buffers(), model.buffers(), strict=True):
        assert torch.equal(moved, original)


def test_nothing_is_shared_with_the_original() -> None:
    model = network().train()
    model[0].weight.requires_grad_(False)
    model[0].bias.grad = torch.ones(3)
    before = snapshot(model)
    direction = {"0.weight": torch.ones(3, 2, 1, 1)}
    perturbed = PerturbedNetwork("model", model, (direction, direction), torch.device("cpu"))
    assert not any(module.training for module in perturbed.model.modules())
    assert all(parameter.requires_grad for parameter in perturbed.parameters)
    with torch.no_grad():
        for tensor in [*perturbed.model.parameters(), *perturbed.model.buffers()]:
            tensor.fill_(7)
    perturbed.move_to_(1, 1)
    assert same_snapshot(before, snapshot(model))
