"""Without the packages of the extra, the error names it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import compress
from compress.exporters import onnx as exporter
from helpers.exported_runs import IMAGES, small_network


def test_without_the_extra_it_is_missed_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxslim" else found(name))
    with pytest.raises(exporter.MissingExtra, match=r"^ONNX needs onnxslim: .*pip install 'compress\[onnx\]'"):
        exporter.export(small_network(8), tmp_path / "model.onnx", IMAGES)
    with pytest.raises(ImportError, match=r"compress\[onnx\]"):
        compress.prune(
            small_network(8),
            {"budget": {"macs": "50%"}, "export": "onnx"},
            example_inputs=IMAGES,
            workdir=tmp_path / "w",
        )
