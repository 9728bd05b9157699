"""Tracing a model whose code changes the model from run to run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import compress
from cases import Net, distance, random_keep, run
from compress import Plan
from compress.recipe import Target

CALLS = 20


def new_buffers(m: Any, x: Tensor) -> Tensor:
    """Replace two buffers in every call, one of them by another shape."""
    m.grid = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype) * torch.ones(x.shape[-2], 1, dtype=x.dtype)
    y = m.first(x) + m.grid
    m.ramp = torch.arange(x.shape[-1], dtype=x.dtype)
    return m.head(m.second(y.relu() * (m.ramp + 1)).mean((2, 3)))  # type: ignore[no-any-return]


def buffer_of_the_call_before(m: Any, x: Tensor) -> Tensor:
    """Read a buffer, then replace it by an activation of the width of a layer."""
    y = m.first(x)
    out = m.head(m.second(y + m.ramp.sum()).mean((2, 3)))
    m.ramp = y.mean((0, 2, 3))
    return out  # type: ignore[no-any-return]


def parts_in_training(m: Any, x: Tensor) -> Tensor:
    """Use a layer in training only, so that the model is traced twice; the second run finds the replaced buffers."""
    out = new_buffers(m, x)
    return out + m.extra(x.mean((2, 3))) if m.training else out  # type: ignore[no-any-return]


def depends_on_values(m: Any, x: Tensor) -> Tensor:
    """Run a child that replaces its buffers twice, on a path that depends on values."""
    return m.inner(x) + (m.inner(x + 1) if x.sum() > -1e9 else 0)  # type: ignore[no-any-return]


def network(code: Any) -> nn.Module:
    torch.manual_seed(0)
    if code is depends_on_values:
        return Net(code, inner=network(new_buffers)).double().eval()
    first, second, head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1), nn.Linear(6, 4)
    model = Net(code, first=first, second=second, head=head)
    if code is parts_in_training:
        model.extra = nn.Linear(3, 4)
    model.register_buffer("grid", torch.zeros(1, 1, 8, 8))
    model.register_buffer("ramp", torch.zeros(1))
    return model.double().eval()


@pytest.mark.parametrize("code", [new_buffers, buffer_of_the_call_before, parts_in_training, depends_on_values])
def test_model_that_replaces_its_buffers_has_the_same_groups_in_every_call(code: Any) -> None:
    model, x = network(code), torch.randn(2, 3, 8, 8).double()
    results = [compress.find_groups(model, x) for _ in range(CALLS)]
    assert {repr(groups) for groups in results} == {repr(results[0])}
    assert {"first", "second"} <= {g.name.removeprefix("inner.") for g in results[0]}
    plan = Plan.build(model, results[0], random_keep(results[0], 0.5))
    zeroed, sliced = plan.zero_(copy.deepcopy(model)), plan.apply_(copy.deepcopy(model))
    assert distance(run(sliced, x), run(zeroed, x)) < 1e-10


def test_convit_replaces_its_relative_positions() -> None:
    torch.manual_seed(0)
    model = timm.create_model("convit_tiny", img_size=32, depth=2, local_up_to_layer=1, num_classes=5).eval()
    x, target = torch.randn(1, 3, 32, 32), Target(attention=True, mlp=True)
    results = [compress.find_groups(model, x, target) for _ in range(5)]
    assert {repr(groups) for groups in results} == {repr(results[0])}
    assert {"blocks.0.mlp.fc1", "blocks.1.mlp.fc1"} <= {g.name for g in results[0]}
