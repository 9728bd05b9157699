"""Quantized files: smaller, measured on their own, and off by no more than their steps."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import compress
from compress.exporters import onnx as exporter
from helpers.exported_runs import SHORT_TIMING, digit_loaders


def test_int8_has_a_smaller_file_and_an_accuracy_of_its_own(exported_run: tuple[compress.Pruned, Path]) -> None:
    pruned, folder = exported_run
    found = exporter.ExportReport.from_dict(pruned.report.export).int8
    assert found is not None
    assert found.bytes == (folder / "model.int8.onnx").stat().st_size < 0.5 * (folder / "model.onnx").stat().st_size
    assert found.calibrated_on == 16 * 64
    network, task = exporter.OnnxRunner(folder / "model.int8.onnx"), compress.Classification(*digit_loaders())
    assert task.evaluate(network, digit_loaders()[1]) == found.metrics
    assert task.evaluate(pruned.model, digit_loaders()[1])["accuracy"] == pytest.approx(found.float_metrics["accuracy"])
    file = onnx.load(folder / "model.int8.onnx")
    kinds = {t.data_type for t in file.graph.initializer if t.name.endswith("weight_quantized")}
    assert kinds == {onnx.TensorProto.INT8}
    assert exporter.read_metadata(folder / "model.int8.onnx") == exporter.read_metadata(folder / "model.onnx")


def test_quantizing_without_data_is_an_error(exported_run: tuple[compress.Pruned, Path], tmp_path: Path) -> None:
    source = exported_run[1] / "model.onnx"
    with pytest.raises(exporter.ExportError, match="calibration: expected at least one batch; got none"):
        exporter.quantise(source, tmp_path / "int8.onnx", [])
    with pytest.raises(exporter.ExportError, match=r"onnxruntime fails on input\[2, 3, 8, 8\]"):
        exporter.quantise(source, tmp_path / "int8.onnx", [torch.randn(2, 3, 8, 8)])
    assert not list(tmp_path.iterdir())


def test_a_linear_layer_in_int8_is_off_by_no_more_than_its_steps(tmp_path: Path) -> None:
    """Weights (7 bits) and inputs (8 bits) are off by half a step at most, times what they are multiplied with.

    Inputs and weights near the ends of their ranges overflow 16 bits on a CPU without VNNI if weights have 8 bits.
    """
    torch.manual_seed(0)
    model, x = nn.Linear(16, 4, bias=False), torch.rand(64, 16) * 2 - 1
    exporter.export(model, tmp_path / "a.onnx", x, timing=SHORT_TIMING)
    exporter.quantise(tmp_path / "a.onnx", tmp_path / "b.onnx", [x], timing=SHORT_TIMING)
    off = (exporter.OnnxRunner(tmp_path / "b.onnx")(x) - model(x).detach()).abs().max()
    weight = model.weight.detach()
    step = weight.abs().max() / 63 / 2 * x.abs().sum(1).max() + 2 / 255 / 2 * weight.abs().sum(1).max()
    step += (model(x).max() - model(x).min()).detach() / 255  # of the output
    assert 0 < off < 1.1 * step
    kept = [t for t in onnx.load(tmp_path / "b.onnx").graph.initializer if t.data_type == onnx.TensorProto.INT8]
    assert max(numpy_helper.to_array(t).size for t in kept) == weight.numel()
