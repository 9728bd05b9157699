"""Inputs and code that cannot be exported are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress.exporters import onnx as exporter
from helpers.exported_runs import IMAGES, SHORT_TIMING, small_network


class Odd(nn.Module):
    """A module whose code stands in the way."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.conv, self.run = nn.Conv2d(1, 4, 3), run

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.run(self.conv(x))
        return out


class Around(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.inner = Odd(run)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (torch.lgamma, r"^inner: the operator prims\.lgamma has no translation to ONNX\. Write the module"),
        (lambda x: x if x.sum() > 0 else -x, "^inner: its code branches on the values of its activations"),
        (lambda x: x.reshape(2, -1), "^dynamic_batch: the model's code fixes a dimension .* dynamic_batch=False"),
        (lambda x: str(x.shape), "^the model returns str, which contains no tensor"),
    ],
)
def test_code_that_cannot_be_exported_is_named_by_its_module(run: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(exporter.ExportError, match=said):
        exporter.export(Around(run).eval(), tmp_path / "model.onnx", IMAGES, timing=SHORT_TIMING)
    assert not list(tmp_path.iterdir())


def test_a_fixed_batch_is_exported_where_the_code_asks_for_one(tmp_path: Path) -> None:
    model = Around(lambda x: x.reshape(2, -1)).eval()
    report = exporter.export(model, tmp_path / "model.onnx", IMAGES, dynamic_batch=False, timing=SHORT_TIMING)
    assert report.inputs == {"x": [2, 1, 8, 8]} and report.batch_size == 2


@pytest.mark.parametrize("opset", [7, 11, 99])
def test_an_opset_that_the_model_cannot_have_is_an_error(opset: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(2), nn.LayerNorm(64)).eval()
    said = f"^opset: {opset} is too {'old' if opset < 18 else 'new'} for this model; .* leave opset out"
    with pytest.raises(exporter.ExportError, match=said):
        exporter.export(model, tmp_path / "model.onnx", IMAGES, opset=opset, timing=SHORT_TIMING)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (torch.randn(2, 3, 8, 8), r"^example_inputs: the model does not run on float32\[2, 3, 8, 8\]"),
        ((), "^example_inputs: expected at least one tensor"),
        ([torch.randn(1, 8, 8)], "^dynamic_batch: cannot tell which dimension"),
        (3, "^example_inputs: expected a tensor, a tuple of arguments"),
    ],
)
def test_example_inputs_that_do_not_fit_are_refused(inputs: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises((exporter.ExportError, TypeError), match=said):
        exporter.export(small_network(8), tmp_path / "model.onnx", inputs, timing=SHORT_TIMING)


def test_a_model_in_double_precision_is_asked_to_be_single(tmp_path: Path) -> None:
    with pytest.raises(exporter.ExportError, match=r"^stem\.0\.weight: expected float32; got torch\.float64"):
        exporter.export(small_network(8).double(), tmp_path / "model.onnx", IMAGES.double(), timing=SHORT_TIMING)
