"""`export` in a recipe: from a dense model to a checked file in one call."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import compress
from compress.exporters import onnx as exporter
from helpers.exported_runs import RECIPE, digit_loaders, small_network


def test_the_report_shows_the_file_in_the_table_and_on_the_page(exported_run: tuple[compress.Pruned, Path]) -> None:
    pruned, folder = exported_run
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(pruned.report)
    text, page = console.export_text(), (folder / "report.html").read_text()
    for shown in ("onnxruntime", "difference from model", "int8: accuracy", "opset 20"):
        assert shown in text and shown in page
    assert json.loads((folder / "report.json").read_text())["export"] == pruned.report.export


def test_a_finished_run_comes_back_with_its_file_and_saves_it_along(exported_run: tuple[compress.Pruned, Path]) -> None:
    _, folder = exported_run
    train, val = digit_loaders()
    recipe = RECIPE | {"export": {"int8": True}}
    before = (folder / "model.onnx").read_bytes()
    again = compress.prune(small_network(), recipe, train=train, val=val, workdir=folder, resume=True, quiet=True)
    assert again.report.export["path"] == str(folder / "model.onnx")
    again.save(folder)
    assert (folder / "model.onnx").read_bytes() == before


class Refuses(nn.Sequential):
    """Runs and prunes, and has no translation as long as it is told so."""

    stubborn = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out.lgamma() if self.stubborn else out


def test_an_export_that_fails_loses_nothing_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Refuses(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 3)).eval()

    x, recipe = torch.randn(2, 1, 8, 8), RECIPE | {"export": "onnx"}
    given: dict[str, Any] = {"example_inputs": x, "workdir": tmp_path / "out", "quiet": True}
    with pytest.raises(exporter.ExportError, match="lgamma has no translation to ONNX"):
        compress.prune(make(), recipe, **given)
    assert not (tmp_path / "out" / "plan.json").exists()  # it is known before anything is spent
    with monkeypatch.context() as patch, pytest.raises(exporter.ExportError, match="lgamma has no translation to ONNX"):
        patch.setattr("compress.pipeline.run.try_export", lambda *_: None)
        compress.prune(make(), recipe, **given)
    assert not (tmp_path / "out" / "model.onnx").exists()
    compress.load(make(), tmp_path / "out")
    monkeypatch.setattr(Refuses, "stubborn", False)
    given["resume"] = True
    pruned = compress.prune(make(), recipe | {"export": {"slim": False}, "timing": {"repeats": 3}}, **given)
    assert (tmp_path / "out" / "model.onnx").exists() and pruned.report.export["opset"] >= 18
    with pytest.raises(FileExistsError, match=r"(?s)`compress export`:\n  export.slim: was False, is True"):
        compress.prune(make(), recipe, **given)


@pytest.mark.parametrize(
    ("recipe", "given", "said"),
    [
        ({"export": "onnx"}, {}, "export: the file is written to the working directory, and there is none"),
        ({"export": {"int8": True}}, {"workdir": True}, "train: export.int8 measures ranges on training data"),
        ({"export": {"int8": True, "half": True}}, {}, "export: expected half or int8"),
        ({"export": "tflite"}, {}, "export.*: expected one of onnx; got 'tflite'"),
        ({"export": {"opsett": 3}}, {}, "export.opsett: expected one of .*opset.* Did you mean opset"),
    ],
)
def test_exports_that_cannot_work_are_refused_before_the_start(
    recipe: dict[str, Any], given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    place = {"workdir": tmp_path / "out"} if given else {}
    with pytest.raises(ValueError, match=said):
        compress.prune(small_network(), RECIPE | recipe, example_inputs=torch.randn(1, 1, 8, 8), quiet=True, **place)
