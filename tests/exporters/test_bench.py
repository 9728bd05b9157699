"""Files are timed against each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import compress
from compress.exporters import onnx as exporter
from helpers.commands import run
from helpers.exported_runs import SHORT_TIMING, small_network


def test_bench_compares_files_in_a_table_and_as_json(
    exported_run: tuple[compress.Pruned, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(exported_run[1] / name) for name in ("model.onnx", "model.int8.onnx")]
    words = ["bench", *files, "--batch", "3", "--repeats", "6", "--threads", "1"]
    code, out, _ = run(monkeypatch, capsys, *words, "--json")
    found = json.loads(out)
    assert code == 0 and [entry["path"] for entry in found["files"]] == files
    assert found["inputs"] == {"input": [3, 1, 8, 8]} and found["threads"] == 1 and found["repeats"] == 6
    assert found["files"][0]["ratio"] == [1, 1, 1] and all(entry["latency_ms"] > 0 for entry in found["files"])
    code, out, _ = run(monkeypatch, capsys, *words)
    assert code == 0 and "1 thread, 6 runs of each in turn" in " ".join(out.split())


def test_bench_asks_for_what_it_cannot_know(exported_run: tuple[compress.Pruned, Path], tmp_path: Path) -> None:
    free, other = tmp_path / "free.onnx", tmp_path / "other.onnx"
    exporter.export(small_network(), free, torch.randn(1, 1, 8, 8), dynamic_size=True, timing=SHORT_TIMING)
    exporter.export(nn.Linear(3, 2), other, torch.randn(1, 3), timing=SHORT_TIMING)
    with pytest.raises(
        exporter.ExportError, match=r"input: its shape is \['batch', 1, 'height', 'width'\]: give the sizes"
    ):
        exporter.bench([free])
    assert exporter.bench([free], shape=[1, 1, 9, 9], repeats=6).inputs == {"input": [1, 1, 9, 9]}
    with pytest.raises(exporter.ExportError, match=r"--input: expected a shape of input.*got \[1, 2, 9, 9\]"):
        exporter.bench([free], shape=[1, 2, 9, 9])
    with pytest.raises(exporter.ExportError, match=r"other.onnx: expected the inputs of .*model.onnx"):
        exporter.bench([exported_run[1] / "model.onnx", other])
    with pytest.raises(exporter.ExportError, match=r"nowhere.onnx: no such file"):
        exporter.bench([tmp_path / "nowhere.onnx"])
