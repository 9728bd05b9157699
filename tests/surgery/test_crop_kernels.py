"""Cutting zero rows and columns off the outside of a kernel preserves the function."""

from __future__ import annotations

import copy
import json
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import compress
from compress.errors import PlanError
from compress.surgery.crop_kernels import nonzero_spans
from compress.surgery.plan import Plan


def planned(model: nn.Module, kernels: dict[str, Any], x: torch.Tensor, keep: Any = None) -> Plan:
    return Plan.build(model, compress.find_groups(model, x), keep or {}, kernels)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("dilation", [1, 2])
def test_every_cut_of_a_kernel_computes_what_zeros_did(stride: int, padding: int, dilation: int) -> None:
    torch.manual_seed(0)
    settings = {"stride": (stride, 1), "padding": (padding, 1), "dilation": (dilation, 1)}
    model = nn.Sequential(nn.Conv2d(2, 3, (4, 3), **settings), nn.Conv2d(3, 2, 1)).double()  # type: ignore[arg-type]
    x = torch.randn(2, 2, 13, 9).double()
    for (a, b), (c, d) in product([(0, 4), (1, 4), (0, 2), (2, 3), (1, 3)], [(0, 3), (1, 2), (0, 1), (1, 3)]):
        plan = planned(model, {"0.weight": {2: (a, b), 3: (c, d)}}, x)
        zeroed, small = plan.zero_(copy.deepcopy(model)), plan.apply_(copy.deepcopy(model))
        assert small[0].weight.shape[2:] == (b - a, d - c) == small[0].kernel_size
        assert torch.allclose(zeroed(x), small(x), rtol=0, atol=1e-13)
        assert type(small[0]) is nn.Conv2d
        uneven = a != 4 - b or c != 3 - d or a * dilation > padding
        assert (small[0].padding_mode == "constant") == uneven


def test_cut_kernels_are_saved_and_compose(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 5, padding=2), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)).double()
    x = torch.randn(2, 2, 8, 8).double()
    first = planned(model, {"0.weight": {2: (1, 5)}}, x, {"0": [0, 2, 3]})
    once = first.apply_(copy.deepcopy(model))
    second = planned(once, {"0.weight": {2: (0, 3), 3: (1, 4)}, "2.weight": {3: (1, 2)}}, x, {"0": [0, 2]})
    both = first.then(second)
    both.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["attributes"]["0"]["kernel_size"] == [3, 3]
    again = Plan.load(tmp_path / "plan.json").apply_(copy.deepcopy(model))
    assert again[0].weight.shape == (2, 2, 3, 3)
    twice = second.apply_(copy.deepcopy(once))
    assert torch.equal(again(x), twice(x))
    assert torch.allclose(both.zero_(copy.deepcopy(model))(x), again(x), rtol=0, atol=1e-13)


def test_grouped_convolutions_and_other_ranks() -> None:
    torch.manual_seed(0)
    for layer, x in (
        (nn.Conv2d(4, 4, 3, padding=1, groups=4), torch.randn(2, 4, 6, 6)),
        (nn.Conv1d(4, 3, 5, padding=2), torch.randn(2, 4, 9)),
        (nn.Conv3d(2, 3, 3, padding=1), torch.randn(1, 2, 4, 5, 6)),
    ):
        model, x = nn.Sequential(layer).double(), x.double()
        plan = planned(model, {"0.weight": {2: (1, 3)}}, x)
        small = plan.apply_(copy.deepcopy(model))
        assert torch.allclose(plan.zero_(model)(x), small(x), rtol=0, atol=1e-13)


def test_spans_exclude_the_zeros_at_the_rim() -> None:
    weight = torch.zeros(2, 3, 5, 4)
    assert nonzero_spans(weight) == {}, "a kernel of zeros is left as it is"
    weight[1, 0, 1, 2] = 1
    weight[0, 2, 3, 3] = 1
    assert nonzero_spans(weight) == {2: (1, 4), 3: (2, 4)}
    assert nonzero_spans(torch.ones(2, 2)) == {}


@pytest.mark.parametrize(
    ("layer", "left", "match"),
    [
        (nn.Conv2d(2, 2, 3, padding="same"), {2: (0, 1)}, "with zero padding given as a number; got Conv2d"),
        (
            nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
            {2: (0, 1)},
            "with zero padding given as a number; got Conv2d",
        ),
        (nn.Conv2d(2, 2, 3), {2: (1, 1)}, r"expected rows within a kernel of \[3, 3\]; got 1 to 1 along 2"),
        (nn.Conv2d(2, 2, 3), {4: (0, 1)}, "expected rows within a kernel"),
    ],
)
def test_kernel_that_cannot_be_cut_is_an_error(layer: nn.Module, left: Any, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        planned(nn.Sequential(layer), {"0.weight": left}, torch.randn(1, 2, 6, 6))
