"""Comparing outputs: integers, complex numbers, empty and non-finite outputs."""

from __future__ import annotations

import torch

import compress
from compress.surgery import compare_outputs
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
