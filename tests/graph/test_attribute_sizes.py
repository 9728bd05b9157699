"""Attributes that hold widths: traced through arithmetic, followed by the cut, joined or frozen if they must be."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import compress
from cases import randomise_
from compress.graph.attribute_sizes import Attribute, AttributeSize, tracked_attributes
from compress.recipe import Target
from compress.surgery.verify import random_widths


class Splitting(nn.Module):
    """Splits what one layer writes by sizes in attributes: numbers, a tuple, sums and products of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.left, self.right, self.sizes = kind, 6, 10, (6, 10)
        self.first, self.a, self.b = nn.Linear(5, 16), nn.Linear(6, 4), nn.Linear(10, 4)
        self.pairs, self.both = 2, 16

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.kind == "numbers":
            parts = h.split([self.left, self.right], -1)
        elif self.kind == "tuple":
            parts = torch.split(h, self.sizes, dim=-1)
        elif self.kind == "sum":
            parts = h.view(-1, self.left + self.right).split((self.left, self.both - self.left), -1)
        else:  # a closure over the sizes, which nothing can follow
            left, right = 6, 10
            parts = h.split([left, right], -1)
        out: Tensor = self.a(parts[0].relu()) + self.b(parts[1].tanh())
        return out


def check_at_random_widths(model: nn.Module, x: Tensor, target: Target | None = None, plans: int = 10) -> Any:
    """Check zeroed against sliced at random unequal widths; return the groups."""
    model = randomise_(model.double()).eval()
    x = x.double()
    groups = compress.find_groups(model, x, target)
    for seed in range(plans):
        random = np.random.default_rng(seed)
        keep = {g.name: g.indices_per_head(int(random.integers(1, g.width // g.num_heads + 1)), random) for g in groups}
        plan = compress.Plan.build(model, groups, keep)
        with torch.no_grad():
            zeroed = plan.zero_(copy.deepcopy(model))(x)
            sliced = plan.apply_(copy.deepcopy(model))(x)
        assert torch.allclose(zeroed, sliced, rtol=1e-9, atol=1e-12)
    return groups


@pytest.mark.parametrize("kind", ["numbers", "tuple"])
def test_unequal_parts_of_a_split_are_cut_independently(kind: str) -> None:
    groups = check_at_random_widths(Splitting(kind), torch.randn(3, 5))
    assert sorted(g.width for g in groups) == [6, 10]


@pytest.mark.parametrize("kind", ["sum", "closure"])
def test_sizes_that_nothing_can_follow_are_refused(kind: str) -> None:
    groups = check_at_random_widths(Splitting(kind), torch.randn(3, 5))
    if kind == "closure":
        assert not len(groups) and "split into unequal pieces [6, 10]" in " ".join(r.reason for r in groups.refused)


class SharedAttribute(nn.Module):
    """Two layers whose outputs are viewed by the same attribute, which can hold one value only."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 12
        self.a, self.b, self.last = nn.Linear(5, 12), nn.Linear(5, 12), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x).view(-1, self.width), self.b(x).view(-1, self.width)
        out: Tensor = self.last(torch.cat([a.relu(), b.tanh()], 1))
        return out


def test_dimensions_that_share_an_attribute_are_cut_together() -> None:
    groups = check_at_random_widths(SharedAttribute(), torch.randn(3, 5))
    assert [g.width for g in groups] == [12]
    plan = compress.Plan.build(SharedAttribute(), groups, random_widths(list(groups), 0))
    assert plan.attributes[""]["width"] == len(plan.keep["a"])


class HeadsOfTwoSizes(nn.Module):
    """Attention with its sizes in attributes; values are wider than queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.key_size, self.value_size = 3, 6, 10
        self.qkv, self.out = nn.Linear(24, 3 * (2 * 6 + 10)), nn.Linear(30, 24)

    def forward(self, x: Tensor) -> Tensor:
        sizes = (self.key_size, self.key_size, self.value_size)
        q, k, v = self.qkv(x).view(*x.shape[:2], self.heads, sum(sizes)).transpose(1, 2).split(sizes, 3)
        weights = (q @ k.transpose(-2, -1) * 6**-0.5).softmax(-1)
        out: Tensor = self.out((weights @ v).transpose(1, 2).reshape(*x.shape[:2], self.heads * self.value_size))
        return out


@pytest.mark.parametrize(("attention", "widths"), [("heads", [3]), (("qk", "v"), [6, 10]), (True, [6, 10])])
def test_heads_and_their_sizes_in_attributes_are_cut_independently(attention: Any, widths: list[int]) -> None:
    target = Target(channels=False, attention=attention)
    groups = check_at_random_widths(HeadsOfTwoSizes(), torch.randn(2, 9, 24), target)
    assert sorted(g.width for g in groups) == widths


class ParityOfWidth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        out: Tensor = self.last(h if h.shape[1] % 2 == 0 else 1.5 * h)
        return out


def test_code_that_depends_on_the_parity_of_a_width_is_refused() -> None:
    assert [g.name for g in compress.find_groups(ParityOfWidth(), torch.randn(1, 3, 8, 8))] == []


class ExportPath(nn.Module):
    """Has a second path, as for export, that splits by an attribute which the traced path does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.c = 8
        self.first, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.cat([part.relu() for part in self.first(x).chunk(2, 1)], 1))
        return out

    def forward_split(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.cat([part.relu() for part in self.first(x).split((self.c, self.c), 1)], 1))
        return out


def test_attribute_that_the_traced_path_does_not_read_is_set_along() -> None:
    model, x = ExportPath().eval(), torch.randn(1, 3, 4, 4)
    groups = compress.find_groups(model, x)
    compress.Plan.build(model, groups, {"first": [0, 2, 5]}).apply_(model)
    assert model.c == 3 and torch.equal(model(x), model.forward_split(x))


class ScaledByAttribute(nn.Module):
    """Divides by the root of an attribute that equals a width, and must keep the dense value."""

    def __init__(self) -> None:
        super().__init__()
        self.dim = 8
        self.first, self.last = nn.Linear(5, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.first(x).chunk(2, -1)
        out: Tensor = self.last(torch.cat([p.relu() for p in parts], -1)) * self.dim**-0.5 / math.sqrt(self.dim)
        return out


def test_attribute_that_the_code_computes_with_stays() -> None:
    groups = check_at_random_widths(ScaledByAttribute(), torch.randn(3, 5))
    assert [g.width for g in groups] == [8]


def test_sizes_remember_their_attributes_through_arithmetic() -> None:
    model = Splitting("numbers")
    with tracked_attributes(model) as numeric:
        left, right = Attribute("", "left"), Attribute("", "right")
        total: Any = 2 * model.left + model.right // 2 - 1
        assert type(total) is AttributeSize and total == 16 and total.attributes == {left, right}
        assert not total.is_plain and model.left.is_plain and model.sizes[1].attributes == {("", "sizes", 1)}  # type: ignore
        assert type(copy.deepcopy(model.left)) is int and not numeric
        assert math.isclose(model.right**-0.5, 10**-0.5) and numeric == {right}
    assert type(model.left) is int and model.sizes == (6, 10) and type(model.sizes[0]) is int


class ViewByAttribute(nn.Module):
    """A bias in a shape that an attribute holds, with -1 for the width."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = (1, -1, 1, 1)
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x) + self.bias.view(self.shape)))
        return out


def test_minus_one_in_an_attribute_follows_no_width() -> None:
    model = ViewByAttribute()
    groups = compress.find_groups(model, torch.randn(1, 3, 8, 8))
    assert [g.name for g in groups] == ["first"]
    plan = compress.Plan.build(model, groups, {"first": [1, 4, 5]})
    assert "" not in plan.attributes
    assert plan.apply_(model).shape == (1, -1, 1, 1)
