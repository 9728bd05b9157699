"""A file runs as a module; other files and other inputs are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from compress.exporters import onnx as exporter
from helpers.exported_runs import IMAGES


def test_a_file_that_is_not_onnx_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(exporter.ExportError, match=r"model.onnx: onnxruntime .* does not load it"):
        exporter.OnnxRunner(tmp_path / "model.onnx")


def test_a_runner_called_with_other_inputs_says_which_it_has(exported: tuple[nn.Module, Path]) -> None:
    runner = exporter.OnnxRunner(exported[1])
    with pytest.raises(exporter.ExportError, match=r"^the file expects 1 tensors, input; got 2"):
        runner(IMAGES, IMAGES)
    with pytest.raises(exporter.ExportError, match=r"^onnxruntime fails on input\[2, 3, 8, 8\]"):
        runner(torch.randn(2, 3, 8, 8))
