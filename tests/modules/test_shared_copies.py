"""A shared copy runs like its model, shares its parameters and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from cases import CASES, Net, build, example, run
from compress.modules.shared_copies import shared_copy


def test_shared_copy_computes_what_the_model_computes() -> None:
    for case in CASES.values():
        model = build(case)
        for a, b in zip(run(model, example(case)), run(shared_copy(model), example(case)), strict=True):
            assert torch.equal(a, b), case.name


def test_parameters_are_shared_and_buffers_are_not() -> None:
    model = build(CASES["residual_stream"])
    copied = shared_copy(model)
    assert all(a is b for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    pairs = list(zip(model.buffers(), copied.buffers(), strict=True))
    assert pairs and all(a is not b and torch.equal(a, b) for a, b in pairs)
    assert not {id(m) for m in model.modules()} & {id(m) for m in copied.modules()}


def test_references_between_modules_point_into_the_copy() -> None:
    conv = nn.Conv2d(3, 4, 1)
    model = Net(lambda m, x: m.again[0](x), conv=conv)
    model.again = [conv]  # a plain list, which registers nothing
    model.table = torch.arange(6.0)
    copied: Any = shared_copy(model)
    assert copied.again[0] is copied.conv is not conv
    assert copied.table is not model.table and torch.equal(copied.table, model.table)


def test_modules_used_twice_stay_one() -> None:
    layer = nn.Linear(4, 4)
    copied: Any = shared_copy(nn.Sequential(layer, nn.ReLU(), layer))
    assert copied[0] is copied[2]


def test_hooks_go_along() -> None:
    def double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return 2 * output

    model = nn.Sequential(nn.Linear(3, 2))
    model[0].register_forward_hook(double)
    x = torch.randn(1, 3)
    assert torch.equal(shared_copy(model)(x), model(x))


def test_class_that_copies_itself_is_asked_to() -> None:
    class Own(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Own:
            made = Own(self.in_features, self.out_features)
            made.weight, made.bias = (memo.get(id(p), copy.deepcopy(p, memo)) for p in (self.weight, self.bias))
            made.told = True
            return made

    copied: Any = shared_copy(nn.Sequential(Own(2, 3)))
    assert copied[0].told
