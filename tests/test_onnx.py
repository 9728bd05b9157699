"""Exported files: every small network, cut, gives the file's numbers; the families of transformers likewise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
import torch
from case import build, example, groups_of, random_keep, tensors_of
from cases import CASES
from compress.exporters import onnx as exporter
from test_attention import BOTH, FAMILIES, family, some
from torch import Tensor, nn

import compress
from compress import Plan
from compress.recipe import Timing
from compress.slicing import slice_

BRIEF = Timing(repeats=3)
BUNDLE = 8
NOT_A_GRAPH = {"data_dependent_control_flow"}  # refused, as a test below has it


class Side(nn.Module):
    """Networks that read the same input, one export for all of them: outputs go by the networks' names."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {name: part(x) for name, part in self.parts.items()}


def bundles() -> list[tuple[str, ...]]:
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, case in CASES.items():
        if name not in NOT_A_GRAPH:
            by_shape.setdefault(case.shape, []).append(name)
    return [tuple(names[i : i + BUNDLE]) for names in by_shape.values() for i in range(0, len(names), BUNDLE)]


def cut(name: str) -> nn.Module:
    """A case's network, cut at random, in single precision."""
    model, groups = build(CASES[name]), groups_of(name)
    return slice_(model, Plan.build(model, groups, random_keep(groups, 0.6))).float()


def in_runtime(path: Path, x: Tensor) -> list[Tensor]:
    """The file as a stranger runs it: onnxruntime alone."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(out) for out in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


def agree(model: nn.Module, path: Path, *batches: Tensor, tolerance: float = 1e-5) -> None:
    """Compare with the network in double precision, which is nobody's float32 arithmetic."""
    exact = copy.deepcopy(model).double().eval()
    for x in batches:
        with torch.no_grad():
            expected = tensors_of(exact(x.double()))
        got = in_runtime(path, x)
        assert [t.shape for t in got] == [t.shape for t in expected]
        for a, b in zip(got, expected, strict=True):
            assert float((a.double() - b).abs().max()) <= tolerance * float(b.abs().max())


@pytest.mark.parametrize("names", bundles(), ids=lambda names: names[0])
def test_cut_networks_and_their_files_agree_on_any_batch(names: tuple[str, ...], tmp_path: Path) -> None:
    model, path = Side({name: cut(name) for name in names}).eval(), tmp_path / "model.onnx"
    first = CASES[names[0]]
    report = exporter.export(model, path, example(first, dtype=torch.float32), timing=BRIEF)
    assert {d["output"] for d in report.differences} == set(report.outputs)
    assert report.max_rel_diff is not None and report.max_rel_diff < 1e-5
    agree(model, path, *(example(first, seed, torch.float32, batch) for seed, batch in enumerate((1, 3, 5))))


TRIED = ("timm vit", "timm swin", "torchvision vit", "torchvision swin", "torchvision swin v2", "torch encoder")


@pytest.mark.parametrize("name", TRIED)
def test_cut_transformers_in_their_compact_forms_and_their_files_agree(name: str, tmp_path: Path) -> None:
    model, x = family(name)
    groups = compress.find_groups(model, x, BOTH)
    compact = slice_(copy.deepcopy(model), Plan.build(model, groups, some(groups))).float()
    path = tmp_path / "model.onnx"
    report = exporter.export(compact, path, x.float(), timing=BRIEF)
    assert report.max_rel_diff is not None and report.max_rel_diff < 1e-5
    agree(compact, path, torch.cat([x, x, x[:1]]).float(), x[:1].float())


def nothing() -> None:
    """A place for networks without a residual branch, once there are some."""


_UNUSED: Callable[[], None] = nothing
assert set(TRIED) <= set(FAMILIES)
