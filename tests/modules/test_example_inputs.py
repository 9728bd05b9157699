"""Example inputs: a tensor, a tuple or a dict, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from compress import TraceError
from compress.modules import clone_tensors
from helpers.block_network import HALF_MACS, block_network


@pytest.mark.parametrize("call", [compress.prune, compress.preview])
def test_inputs_of_a_wrong_shape_are_described(call: Any) -> None:
    wrong = torch.randn(2, 4, 8, 8)
    match = r"(?s)the model does not run on torch\.float32\[2, 4, 8, 8\]: it stops in 0\.0 .*expected.* 3 channels"
    with pytest.raises(TraceError, match=match):
        call(block_network(), HALF_MACS, example_inputs=wrong)
    with pytest.raises(TraceError, match="leading batch dimension"):
        call(block_network(), HALF_MACS, example_inputs=torch.randn(2, 8, 3, 8))


def test_too_many_arguments_are_an_error() -> None:
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(TraceError, match="it stops in the model with TypeError"):
        compress.find_groups(block_network(), (x, x))
    with pytest.raises(TraceError, match=r"picture=torch\.float32"):
        compress.find_groups(block_network(), {"picture": x})
    with pytest.raises(TraceError, match="no arguments"):
        compress.find_groups(block_network(), ())


@pytest.mark.parametrize("wrong", [None, "image.png", 3, {1, 2}])
def test_inputs_that_are_no_call_are_an_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"example_inputs: expected a tensor, .* got {type(wrong).__name__}"):
        compress.find_groups(block_network(), wrong)


def test_inputs_may_be_a_tensor_a_tuple_or_a_dict() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, left: Tensor, right: Tensor | None = None) -> Tensor:
            return self.b(torch.relu(self.a(left if right is None else left + right)))

    x = torch.randn(5, 4)
    for inputs in (x, (x,), (x, x), {"left": x}, {"left": x, "right": x}, (x, None)):
        groups = compress.find_groups(Two(), inputs)
        assert [(g.name, g.width) for g in groups] == [("a", 6)]
        assert int(groups.cost.macs([6])) == 6 * 4 + 6 * 3  # of one example, whatever the batch


def test_writing_to_cloned_inputs_leaves_the_inputs_alone() -> None:
    x, y, label = torch.ones(2), torch.ones(3), object()
    cloned = clone_tensors(((x, [y]), {"label": label}))
    cloned[0][0].zero_()
    cloned[0][1][0].zero_()
    assert x.sum() == 2
    assert y.sum() == 3
    assert cloned[1]["label"] is label
