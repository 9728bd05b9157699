"""Comparing outputs: integers, complex numbers, empty and non-finite outputs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import compress
from compress.surgery import compare_outputs
from compress.surgery.compare_outputs import relative_difference
from helpers.width_dependent import WidthDependent


def test_complex_numbers_are_compared() -> None:
    assert [g.name for g in compress.find_groups(WidthDependent("complex"), torch.randn(2, 3, 8, 8))] == []


def test_integers_are_compared_with_a_note() -> None:
    x = torch.randn(2, 3, 16, 16)
    groups = compress.find_groups(WidthDependent("integers"), x)
    assert [g.name for g in groups] == [] and compare_outputs.INTEGER_OUTPUT_NOTE in groups.notes
    assert "zeroed and sliced outputs differ" in next(r.reason for r in groups.refused if r.name == "first")
    assert compare_outputs.INTEGER_OUTPUT_NOTE not in compress.find_groups(WidthDependent("labels"), x).notes


def test_empty_outputs_are_noted() -> None:
    assert (
        compare_outputs.NO_OUTPUT_NOTE in compress.find_groups(WidthDependent("nothing"), torch.randn(2, 3, 8, 8)).notes
    )


MASKED = torch.tensor([[True, False, False, False, False]])
# Endings of a network that hid an error of a few percent from a comparison by the largest value in single precision.
HIDING: dict[str, Callable[[Tensor], Tensor]] = {
    "minus infinity": lambda out: out.flatten(2).mean(2).masked_fill(MASKED, -torch.inf),
    "smallest float": lambda out: out.flatten(2).mean(2).masked_fill(MASKED, torch.finfo(out.dtype).min),
    "pixels and scores": lambda out: torch.cat([640 * torch.ones_like(out), 1e-3 * out.sigmoid()], 1),
    "large constant": lambda out: 1e6 + out,
    "small gate": lambda out: torch.ones_like(out) + 1e-4 * out,
    "lower precision": lambda out: out.half().float(),
}


class HidingWidth(nn.Module):
    """Depends on a width by a factor close to one, behind an ending that hides it."""

    def __init__(self, ending: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ending, self.first, self.last = ending, nn.Conv2d(3, 16, 3), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return HIDING[self.ending](self.last(h * (1 + h.shape[1] / 1e4)))


@pytest.mark.parametrize("ending", HIDING)
def test_nothing_hides_an_error(ending: str) -> None:
    assert [g.name for g in compress.find_groups(HidingWidth(ending), torch.randn(2, 3, 8, 8))] == []


class ClosedGate(nn.Module):
    """A residual branch behind a scalar that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Parameter(torch.zeros(()))
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return x + self.gate * self.last(h * h.shape[1])


def test_a_gate_at_zero_hides_no_error() -> None:
    assert [g.name for g in compress.find_groups(ClosedGate(), torch.randn(2, 3, 8, 8))] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_of_a_few_percent_show_in_half_precision_models(dtype: torch.dtype) -> None:
    class Slightly(HidingWidth):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).relu()
            out: Tensor = self.last(h * (1 + h.shape[1] / 1e3))
            return out

    groups = compress.find_groups(Slightly("").to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype))
    assert [g.name for g in groups] == []


def test_relative_difference_by_parts() -> None:
    a = torch.cat([640 * torch.rand(2, 4, 9), torch.rand(2, 3, 9)], 1).double() + 1
    b = a.clone()
    b[1, 5, 3] += 1e-3
    assert relative_difference(a, a.clone()) == 0
    assert relative_difference(a, b) > 4e-4  # of the scores, not of the pixels
    a[0, 0, 0] = b[0, 0, 0] = -torch.inf
    assert 4e-4 < relative_difference(a, b) < 1
    b[0, 0, 0] = torch.inf
    assert relative_difference(a, b) == math.inf
    nan = torch.tensor([torch.nan, 1.0])
    assert relative_difference(nan, nan) == 0 and relative_difference(nan, torch.ones(2)) == math.inf
    assert relative_difference(torch.zeros(0), torch.zeros(0)) == 0
