"""slice_ preserves everything about a parameter but its shape, and slices gradients and optimizer state too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, build, distance, example, groups_of, random_keep, run, tensors_of
from compress import Plan
from compress.surgery.slicing import slice_

NAME = "residual_stream_with_projection"


def planned(name: str = NAME, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Plan, Tensor]:
    model, groups = build(CASES[name], dtype=dtype), groups_of(name)
    return model, Plan.build(model, groups, random_keep(groups, 0.5)), example(CASES[name], dtype=dtype)


def cut(tensor: Tensor, plan: Plan, name: str) -> Tensor:
    for dim, kept in plan.slices.get(name, {}).items():
        tensor = tensor.index_select(dim, torch.as_tensor(kept))
    return tensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    model, plan, x = planned(dtype=dtype)
    slice_(model, plan)
    assert all(p.dtype == dtype for p in model.parameters())
    assert run(model, x)[0].dtype == dtype


def test_memory_format_is_kept() -> None:
    model, plan, x = planned()
    model.to(memory_format=torch.channels_last)
    plain = slice_(copy.deepcopy(model).to(memory_format=torch.contiguous_format), plan)
    slice_(model, plan)
    kernels = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert kernels and all(w.is_contiguous(memory_format=torch.channels_last) for w in kernels)
    assert all(p.is_contiguous() for p in plain.parameters())
    assert distance(run(plain, x), run(model, x.to(memory_format=torch.channels_last))) < 1e-12


def test_memory_format_of_volumes_is_kept() -> None:
    model, plan, _ = planned("three_dimensional")
    model.to(memory_format=torch.channels_last_3d)
    slice_(model, plan)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert not model[0].weight.is_contiguous()


def test_frozen_parameters_stay_frozen() -> None:
    model, plan, _ = planned("frozen_stem")
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    slice_(model, plan)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert not all(before.values())


def test_ties_are_kept() -> None:
    model, plan, _ = planned("tied_weights")
    slice_(model, plan)
    assert model.one[0].weight is model.two.weight
    assert model.two.in_channels == model.two.weight.shape[1] < 6


def test_sliced_tensors_own_their_memory() -> None:
    model, plan, _ = planned()
    dense = copy.deepcopy(model)
    slice_(model, plan)
    for name, parameter in model.named_parameters():
        assert parameter.is_leaf
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size(), name
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(float(p.detach().abs().sum()) > 0 for p in dense.parameters())


def test_gradients_are_sliced() -> None:
    model, plan, x = planned()
    model(x).square().sum().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    slice_(model, plan)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, cut(before[name], plan, name)), name


def test_plan_for_another_model_changes_nothing() -> None:
    model, _, _ = planned()
    _, other, _ = planned("chain")
    before = {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="made for another model"):
        slice_(model, other, optimizer=optimizer)
    assert {name: id(t) for name, t in model.state_dict(keep_vars=True).items()} == before
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd with momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    sum(t.square().mean() for t in tensors_of(model(x))).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_step_after_slicing_is_that_of_an_optimizer_built_by_hand(kind: str) -> None:
    model, plan, x = planned()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for _ in range(3):
        train(model, optimizer, x)
    names = [name for name, _ in model.named_parameters()]
    memory = copy.deepcopy(optimizer.state_dict())
    for i, name in enumerate(names):
        shape = dict(model.named_parameters())[name].shape
        entries = memory["state"][i]
        memory["state"][i] = {
            key: cut(value, plan, name) if isinstance(value, Tensor) and value.shape == shape else value
            for key, value in entries.items()
        }
    hand = slice_(copy.deepcopy(model), plan)
    by_hand = OPTIMIZERS[kind](hand.parameters())
    by_hand.load_state_dict(memory)

    slice_(model, plan, optimizer=optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert set(optimizer.state) == set(model.parameters())
    for _ in range(2):
        train(model, optimizer, x)
        train(hand, by_hand, x)
    for (name, a), b in zip(model.named_parameters(), hand.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_optimizer_with_several_groups_of_parameters_keeps_them() -> None:
    model, plan, x = planned()
    vectors = [p for p in model.parameters() if p.ndim == 1]
    others = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.SGD([{"params": vectors, "lr": 0.5}, {"params": others}], lr=0.1, momentum=0.9)
    train(model, optimizer, x)
    slice_(model, plan, optimizer=optimizer)
    ranks = [{p.ndim for p in group["params"]} for group in optimizer.param_groups]
    assert ranks[0] == {1} and 1 not in ranks[1]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    train(model, optimizer, x)


def test_optimizer_without_steps_is_sliced_too() -> None:
    model, plan, x = planned()
    optimizer = torch.optim.AdamW(model.parameters())
    slice_(model, plan, optimizer=optimizer)
    train(model, optimizer, x)
    assert len(optimizer.state) == len(list(model.parameters()))


def test_pruning_leaves_no_hooks_or_parametrizations() -> None:
    model, plan, _ = planned()
    for module in slice_(model, plan).modules():
        assert not torch.nn.utils.parametrize.is_parametrized(module)
        assert not any(len(value) for key, value in vars(module).items() if key.endswith("_hooks"))
