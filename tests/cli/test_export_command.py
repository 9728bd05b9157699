"""The command `compress export`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import compress
from compress.exporters import onnx as exporter
from helpers.commands import run

MODEL = "helpers.exported_runs:small_network"


def test_the_command_exports_what_was_saved(
    exported_run: tuple[compress.Pruned, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pruned, folder = exported_run
    words = ["export", str(folder), "--model", MODEL, "--onnx", str(tmp_path / "a.onnx"), "--data", "digits"]
    code, out, err = run(monkeypatch, capsys, *words, "--int8", str(tmp_path / "b.onnx"), "--opset", "19", "--json")
    assert code == 0, err
    data = json.loads(out)
    assert data["opset"] == 19 and data["max_rel_diff"] < 1e-4 and data["realised"] > 0
    assert 0 < data["int8"]["metrics"]["accuracy"] <= 1 and (tmp_path / "b.onnx").exists()
    exporter.check(pruned.model, tmp_path / "a.onnx", torch.randn(2, 1, 8, 8))


@pytest.mark.parametrize("source", ["digits", "cifar10:nowhere"])
def test_the_command_takes_the_input_from_the_recipes_data_if_they_are_here(
    source: str,
    exported_run: tuple[compress.Pruned, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    exported_run[0].save(tmp_path / "run")
    said = json.loads((tmp_path / "run" / "report.json").read_text())
    said["recipe"]["data"] = {"source": source, "batch_size": 64}
    (tmp_path / "run" / "report.json").write_text(json.dumps(said))
    words = ["export", str(tmp_path / "run"), "--model", MODEL, "--onnx", str(tmp_path / "a.onnx")]
    code, _, err = run(monkeypatch, capsys, *words, "--static")
    if source == "digits":
        assert code == 0, err
        assert exporter.read_metadata(tmp_path / "a.onnx")["inputs"] == {"input": {"shape": [1, 1, 8, 8]}}
    else:
        assert code == 2 and "expected input[1, 3, 224, 224] to have 1 channels" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--onnx", "a.onnx", "--int8", "b.onnx"], "--int8 b.onnx: its ranges are measured on data; give --data"),
        (["--onnx", "a.onnx", "--int8", "./a.onnx"], "--int8 a.onnx: expected another file than --onnx"),
        (["--onnx", "missing/a.onnx", "--input", "1,1,8,8"], "missing/a.onnx: expected an existing directory"),
        (["--onnx", "a.onnx", "--input", "1,3,8,8"], "example_inputs: the model does not run on"),
        (["--onnx", "a.onnx"], "On the command line example_inputs is --input, as a shape such as 1,3,224,224"),
    ],
)
def test_mistakes_of_the_export_command_are_named(
    words: list[str],
    said: str,
    exported_run: tuple[compress.Pruned, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = run(monkeypatch, capsys, "export", str(exported_run[1]), "--model", MODEL, *words)
    assert code == 2 and said in err
