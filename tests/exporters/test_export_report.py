"""The report of an export counts what ONNX counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from compress.exporters import onnx as exporter
from compress.recipe import Timing


def test_the_report_counts_what_onnx_counts(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model, path = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 7)), tmp_path / "model.onnx"
    dense = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 7))
    report = exporter.export(model, path, torch.randn(2, 3, 8, 8), dense=dense, opset=19, timing=Timing(repeats=6))
    file = onnx.load(path)
    assert report.opset == 19 == file.opset_import[0].version
    assert report.file.bytes == path.stat().st_size
    assert report.file.nodes == len(file.graph.node)
    assert report.file.initialisers == len(file.graph.initializer)
    weights = [t for t in file.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert sum(onnx.numpy_helper.to_array(t).size for t in weights) == sum(p.numel() for p in model.parameters())
    assert (report.file.macs, report.dense and report.dense.macs) == (36 * 27 * 4 + 144 * 7, 36 * 27 * 8 + 288 * 7)
    assert report.reduction == 2
    assert report.speedup is not None and report.realised == pytest.approx(report.speedup / 2)
    assert report.threads == 1 and report.batch_size == 1 and report.latency_ms == report.file.latency_ms
    again = type(report).from_dict(report.to_dict())
    assert again == report
    stack = " ".join(m.value for node in file.graph.node for m in node.metadata_props)
    assert "File" not in stack, "paths of the machine that exported it are nobody's business"
