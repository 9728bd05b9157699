"""Exported files of all cases, cut, and of transformers compute what the networks compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet

import compress
from cases import CASES, build, example, groups_of, random_keep, tensors_of
from cases.families import BOTH, family, random_part
from compress import Plan
from compress.cli.quickstart import Network
from compress.exporters import onnx as exporter
from compress.recipe import Target, Timing
from compress.surgery.slicing import slice_

BRIEF = Timing(repeats=3)
BUNDLE = 20
NOT_A_GRAPH = {"data_dependent_control_flow"}  # refused, as test_parity.py shows


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


def in_runtime(path: Path, *inputs: Tensor) -> list[Tensor]:
    """The file as a stranger runs it: onnxruntime alone."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    return [torch.from_numpy(o) for o in session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})]


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
    assert all(any(output.startswith(name) for output in report.outputs) for name in names)
    assert report.max_rel_diff is not None and report.max_rel_diff < 1e-5
    agree(model, path, *(example(first, seed, torch.float32, batch) for seed, batch in enumerate((1, 3, 5))))


@pytest.mark.parametrize(
    "name", ("timm vit", "timm swin", "timm beit", "torchvision vit", "torchvision swin", "torch encoder")
)
def test_cut_transformers_in_their_compact_forms_and_their_files_agree(name: str, tmp_path: Path) -> None:
    model, x = family(name)
    groups = compress.find_groups(model, x, BOTH)
    compact = slice_(copy.deepcopy(model), Plan.build(model, groups, random_part(groups))).float()
    path = tmp_path / "model.onnx"
    exporter.export(compact, path, x[:1].float(), timing=BRIEF)
    agree(compact, path, torch.cat([x, x, x[:1]]).float())


class Two(nn.Module):
    """Two inputs, a flag, outputs in nested containers, and names that values inside the graph have as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor, flag: bool, *, other: dict[str, Tensor]) -> dict[str, Any]:
        both = self.a(x).relu() + (self.b(other["y"]) if flag else 0)
        return {"relu": both, "linear": (both.exp(), [both.argmax(-1), None]), "echo": x}


def test_inputs_and_outputs_in_any_form_have_the_names_that_people_gave_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Two().eval(), tmp_path / "model.onnx"
    x, y = torch.randn(3, 6), torch.randn(3, 6)
    report = exporter.export(model, path, {"x": x, "flag": True, "other": {"y": y}}, timing=BRIEF)
    assert report.inputs == {"x": ["batch", 6], "other_y": ["batch", 6]}
    assert report.outputs == ["relu", "linear_0", "linear_1_0", "echo"]
    expected = tensors_of(model(x, True, other={"y": y}))
    for got, right in zip(in_runtime(path, x, y), expected, strict=True):
        torch.testing.assert_close(got, right)


def _small() -> nn.Module:
    torch.manual_seed(0)
    return Network(8).eval()


def _two_branches_less() -> nn.Module:
    torch.manual_seed(0)
    model = resnet.ResNet(resnet.BasicBlock, [2, 2, 1, 1], num_classes=5).eval()
    model.conv1 = nn.Conv2d(1, 64, 3, 2, 1)
    groups = compress.find_groups(model, torch.randn(1, 1, 12, 12), Target(branches=True))
    return Plan.build(model, groups, {name: [] for name in [*groups.branches][:2]}).apply_(model)


EXTRA: dict[str, Callable[[], nn.Module]] = {
    "two residual branches less": _two_branches_less,
    "half of the MACs": lambda: (
        compress.prune(
            _small(), {"budget": {"macs": "50%"}}, example_inputs=torch.randn(1, 1, 12, 12), quiet=True
        ).model
    ),
}


@pytest.mark.parametrize("name", EXTRA)
def test_images_of_any_size_run_in_a_file_that_was_exported_for_them(name: str, tmp_path: Path) -> None:
    model, path = EXTRA[name](), tmp_path / "model.onnx"
    report = exporter.export(model, path, torch.randn(1, 1, 12, 12), dynamic_size=True, timing=BRIEF)
    assert [*report.inputs.values()] == [["batch", 1, "height", "width"]]
    assert {d["inputs"] for d in report.differences} >= {"example in a batch of 7 of 17x15"}
    agree(model, path, torch.randn(2, 1, 31, 9))


class Six(nn.Sequential):
    """For batches of six at the most."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] <= 6, lambda: "too many images")
        out: torch.Tensor = super().forward(x)
        return out


def test_model_for_one_size_says_which_option_asked_for_others(tmp_path: Path) -> None:
    flat = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    match = r"the model does not run on the example in a batch of 1 of 13x11: .*leave out dynamic_size \(--any-size\)"
    with pytest.raises(exporter.ExportError, match=match):
        exporter.export(flat, tmp_path / "model.onnx", torch.randn(1, 1, 8, 8), dynamic_size=True, timing=BRIEF)
    match = r"the model does not run on the example in a batch of 7: .*too many.*with dynamic_batch=False \(--static\)"
    with pytest.raises(exporter.ExportError, match=match):
        exporter.export(Six(nn.Linear(3, 2)), tmp_path / "model.onnx", torch.randn(2, 3), timing=BRIEF)
    assert not list(tmp_path.iterdir())


def test_half_precision_halves_the_file_and_keeps_single_precision_at_its_ends(tmp_path: Path) -> None:
    model = cut("residual_stream")
    x = example(CASES["residual_stream"], dtype=torch.float32)
    whole = exporter.export(model, tmp_path / "whole.onnx", x, timing=BRIEF)
    half = exporter.export(model, tmp_path / "half.onnx", x, half=True, timing=BRIEF)
    assert half.max_rel_diff is not None and 1e-5 < half.max_rel_diff < 1e-2
    assert half.file.parameters == whole.file.parameters
    assert in_runtime(tmp_path / "half.onnx", x)[0].dtype == torch.float32
    assert next(model.parameters()).dtype == torch.float32
    agree(model, tmp_path / "half.onnx", x, tolerance=1e-2)
    assert exporter.check(model, tmp_path / "half.onnx", x)


def test_the_model_is_not_changed_by_its_export(tmp_path: Path) -> None:
    model = _small().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    exporter.export(model, tmp_path / "model.onnx", torch.randn(2, 1, 8, 8), timing=BRIEF)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
