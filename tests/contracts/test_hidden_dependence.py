"""Code that depends on a width, a value or an activation in a way that no operator shows is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress


class BranchesOnBuffer(nn.Module):
    """Takes another path as long as a buffer is zero, and depends on the width there."""

    initialized: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("initialized", torch.zeros(()))
        self.first, self.last = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        if not self.initialized:
            h = h / h.shape[1]
        out: Tensor = self.last(h)
        return out


def test_a_branch_on_the_value_of_a_buffer_is_verified_on_the_path_that_the_model_takes() -> None:
    assert [g.name for g in compress.find_groups(BranchesOnBuffer(), torch.randn(2, 3, 6, 6))] == []


class LooksInside(nn.Module):
    """Cannot be traced as a whole, and reads something inside of a child that can."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.body = nn.Sequential(nn.Conv2d(3, 12, 1), nn.ReLU(), nn.Conv2d(12, 4, 1))
        self.body[1].register_forward_hook(self.keep)
        self.aux = nn.Conv2d(12, 4, 1)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept = output

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        if out.mean() > 1e9:
            out = out * 2
        if self.reads == "activation":
            return out + self.aux(self.kept)
        return out * self.body[0].out_channels if self.reads == "width" else out


@pytest.mark.parametrize("reads", ["activation", "width"])
def test_a_model_whose_untraced_code_looks_inside_of_a_traced_child_is_refused(reads: str) -> None:
    torch.manual_seed(0)
    assert [g.name for g in compress.find_groups(LooksInside(reads), torch.randn(2, 3, 6, 6))] == []
    assert [g.name for g in compress.find_groups(LooksInside("nothing"), torch.randn(2, 3, 6, 6))] == ["body.0"]


class NumberThatEqualsAWidth(nn.Module):
    """Has an attribute that equals a width by chance and limits values or lengths."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.limit, self.use = 12, use
        self.first, self.last = nn.Conv1d(3, 12, 1), nn.Conv1d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu().reshape(len(x), -1, x.shape[-1])
        if self.use == "clamp":
            h = h.clamp(max=self.limit)
        elif self.use == "crop":
            h = h[..., : self.limit]
        elif self.use == "compare" and x.shape[-1] > self.limit:
            h = 2 * h
        out: Tensor = self.last(h)
        return out


@pytest.mark.parametrize("use", ["clamp", "crop", "compare"])
def test_an_attribute_that_equals_a_width_by_chance_stays(use: str) -> None:
    torch.manual_seed(0)
    model = NumberThatEqualsAWidth(use).eval()
    groups = compress.find_groups(model, torch.randn(2, 3, 5))
    assert [g.name for g in groups] == ["first"]
    plan = compress.Plan.build(model, groups, {"first": [1, 4, 7, 8]})
    zeroed, sliced = plan.zero_(copy.deepcopy(model)), plan.apply_(copy.deepcopy(model))
    assert sliced.limit == 12
    other = 100 * torch.randn(2, 3, 40)
    with torch.no_grad():
        assert torch.allclose(zeroed(other), sliced(other), rtol=1e-4, atol=1e-3)


def test_a_model_that_writes_to_its_input_leaves_the_example_alone() -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 12), nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.first(x.mul_(2)).relu())
            return out

    for batch in (1, 3):
        x = torch.ones(batch, 5)
        compress.find_groups(Doubles(), x)
        assert torch.equal(x, torch.ones(batch, 5))


class OncePerForward(nn.Module):
    """A child that runs only between its parent's set-up and tear-down, and depends on its width."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 12), None

    def forward(self, x: Tensor) -> Tensor:
        assert self.scale is not None
        h: Tensor = self.layer(x) * self.scale
        return h / h.shape[1]


def test_a_module_that_does_not_run_without_its_caller_is_refused_and_no_error() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child, self.last = OncePerForward(), nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.child.scale = 2.0
            out: Tensor = self.last(self.child(x))
            self.child.scale = None
            return out

    assert [g.name for g in compress.find_groups(Parent(), torch.randn(3, 5))] == []


def test_layers_that_are_called_by_keyword_are_cut() -> None:
    class ByKeyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 12), nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(input=self.first(input=x).relu())
            return out

    assert [g.name for g in compress.find_groups(ByKeyword(), torch.randn(3, 5))] == ["first"]
