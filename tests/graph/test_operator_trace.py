"""Tracing a model whose code changes the model from run to run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import compress
from cases import Net, distance, random_keep, randomise_, run, same_bits
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


def scripted_part(kind: str) -> nn.Module:
    part = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
    part = randomise_(part.double()).eval()
    return torch.jit.script(part) if kind == "script" else torch.jit.trace(part, torch.randn(1, 8, 9, 9).double())  # type: ignore[no-any-return, no-untyped-call]


def with_scripted_part(kind: str, nested: bool = False) -> nn.Module:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.first(x)
        x = x + m.scripted(x) if x.ndim == 4 else x
        return m.head(m.third(m.second(x).relu()).mean((2, 3)))  # type: ignore[no-any-return]

    parts = {
        "first": nn.Conv2d(3, 8, 3, padding=1),
        "second": nn.Conv2d(8, 12, 3),
        "third": nn.Conv2d(12, 6, 1),
        "head": nn.Linear(6, 4),
    }
    model: nn.Module = randomise_(Net(forward, **parts).double())
    model.scripted = scripted_part(kind)
    if nested:
        model = Net(lambda m, x: m.inner(x) if x.sum() > -1e9 else m.inner(-x), inner=model)
    return model.train()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_scripted_module_is_left_alone_and_the_rest_is_cut(kind: str, nested: bool) -> None:
    model, x = with_scripted_part(kind, nested), torch.randn(2, 3, 9, 9).double()
    prefix = "inner." if nested else ""
    statistics = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    groups = compress.find_groups(model, x)
    assert [g.name for g in groups] == [f"{prefix}second", f"{prefix}third"]
    assert any(
        r.name == f"{prefix}first" and f"{prefix}scripted, a scripted module, which cannot be cut" in r.reason
        for r in groups.refused
    )
    assert any("scripted modules are not cut" in n and n.endswith(f"{prefix}scripted") for n in groups.notes)
    assert int(groups.cost.params(groups.cost.widths)) == sum(p.numel() for p in model.parameters())
    assert all(torch.equal(t, statistics[name]) for name, t in model.state_dict().items())
    plan = Plan.build(model, groups, random_keep(groups, 0.5))
    zeroed = plan.zero_(copy.deepcopy(model).eval())
    sliced = plan.apply_(copy.deepcopy(model).eval())
    assert distance(run(sliced, x), run(zeroed, x)) < 1e-10
    compress.find_groups(model, x, Target(exclude=[f"{prefix}scripted"]))


def test_network_with_a_scripted_module_is_pruned_and_saved(tmp_path: Path) -> None:
    model, x = with_scripted_part("script").float(), torch.randn(4, 3, 9, 9)
    recipe = {
        "budget": {"macs": "80%"},
        "search": {"method": "netslim", "epochs": "3 steps"},
        "finetune": {"epochs": "2 steps", "distill": {}},
        "timing": {"repeats": 3},
    }
    pruned = compress.prune(model, recipe, train=[(x, torch.arange(4))] * 2, quiet=True)
    assert pruned.report.pruned.macs <= 0.8 * pruned.report.dense.macs
    pruned.save(tmp_path / "pruned")
    loaded = compress.load(with_scripted_part("script").float(), tmp_path / "pruned").eval()
    assert same_bits(run(loaded, x), run(pruned.model, x))


def test_scripted_model_is_refused() -> None:
    model = scripted_part("script")
    with pytest.raises(compress.TraceError, match=r"expected a torch.nn.Module that runs Python code; got a scripted"):
        compress.find_groups(model, torch.randn(1, 8, 9, 9).double())
