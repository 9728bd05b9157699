"""Layers with PyTorch's own code are told apart from layers with changed code."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from compress.modules.plain_layers import ForwardCheck, is_plain_layer


class Subclass(nn.Linear):
    """Changes nothing."""


class OwnForward(nn.Linear):
    """Has its own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class OwnKernel(nn.Conv2d):
    """Has its own kernel behind PyTorch's forward."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight * 2, bias)


def patched() -> nn.Module:
    layer: Any = nn.Linear(2, 2)
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize(
    ("layer", "accepted"),
    [
        (nn.Linear(2, 2), {"none", "class", "full"}),
        (nn.Conv1d(2, 2, 1), {"none", "class", "full"}),
        (Subclass(2, 2), {"none", "class", "full"}),
        (OwnForward(2, 2), {"none"}),
        (OwnKernel(2, 2, 1), {"none", "class"}),
        (patched(), {"none", "class"}),
        (nn.ConvTranspose2d(2, 2, 1), set()),
        (nn.Conv2d(4, 4, 1, groups=2), set()),
        (nn.ReLU(), set()),
    ],
)
def test_layers_are_plain_as_far_as_their_code_is_pytorchs(layer: nn.Module, accepted: set[str]) -> None:
    assert {check.value for check in ForwardCheck if is_plain_layer(layer, forward=check)} == accepted


def test_grouped_convolutions_are_accepted_on_request() -> None:
    assert is_plain_layer(nn.Conv2d(4, 4, 1, groups=2), grouped=True)
