"""The command `compress export`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compress
from compress.exporters import onnx as exporter
from helpers.commands import run

ROOT = Path(__file__).parents[2]
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


TRAP = """from pathlib import Path
Path("imported").touch()
def make():
    Path("called").touch()
"""


def test_a_factory_in_a_saved_report_is_not_imported_and_the_command_says_what_to_type(
    exported_run: tuple[compress.Pruned, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    exported_run[0].save(tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    report["recipe"]["data"] = {"source": "trap_in_a_report:make"}
    (tmp_path / "run" / "report.json").write_text(json.dumps(report))
    (tmp_path / "trap_in_a_report.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    code, _, err = run(monkeypatch, capsys, "export", "run", "--model", MODEL, "--onnx", "a.onnx")
    assert code == 2 and "its data factory 'trap_in_a_report:make' is not called; to use it, type --data" in err
    assert "On the command line example_inputs is --input" in err
    run(monkeypatch, capsys, "export", "run", "--model", MODEL, "--onnx", "a.onnx", "--input", "1,1,8,8")
    assert not (tmp_path / "imported").exists() and (tmp_path / "a.onnx").exists()
    run(monkeypatch, capsys, "export", "run", "--model", MODEL, "--onnx", "b.onnx", "--data", "trap_in_a_report:make")
    assert (tmp_path / "called").exists()  # the user typed it


def test_a_module_in_the_current_directory_does_not_replace_an_installed_one(
    exported_run: tuple[compress.Pruned, Path], tmp_path: Path
) -> None:
    """`cd saved_directory && compress export .`: nothing in it is imported."""
    exported_run[0].save(tmp_path / "run")
    for name in ("onnx", "onnxruntime", "onnxslim", "torchvision", "timm", "sklearn"):
        (tmp_path / "run" / f"{name}.py").write_text("raise SystemExit('the trap was imported')")
    program = "import sys; from compress.cli import main; sys.path[:] = [p for p in sys.path if p]; main()"
    words = ["export", ".", "--model", "torchvision:resnet18", "--onnx", "../a.onnx"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-P", "-c", program, *words],
        cwd=tmp_path / "run",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert "trap" not in result.stderr
    assert result.returncode == 2 and "plan.json" in result.stderr  # the plan of another network
