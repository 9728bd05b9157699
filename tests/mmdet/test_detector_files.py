"""A recipe and the command export detectors; mistakes are named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
import compress.mmdet
from compress.cli import app as cli
from compress.exporters.errors import ExportError
from compress.exporters.metadata import read_metadata
from compress.mmdet import onnx_export as exporter
from helpers.detectors import data_of, make_pictures
from helpers.tiny_detectors import config_of, count_agreeing_detections, detector_that_detects, random_image

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_images_of_another_kind_are_refused() -> None:
    detector = detector_that_detects("Faster R-CNN")
    with pytest.raises(ExportError, match=r"images: expected pixels, uint8, RGB, .*; got float32\[1, 3, 8, 8\]"):
        exporter.export(detector, "never.onnx", torch.zeros(1, 3, 8, 8))
    with pytest.raises(ExportError, match="images: expected at least one; got none"):
        exporter.export(detector, "never.onnx", [])
    with pytest.raises(ExportError, match="part: expected one of detector, features; got 'neck'"):
        exporter.export(detector, "never.onnx", random_image(8, 8), part="neck")


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["compress", "export", *map(str, words)])
    with pytest.raises(SystemExit) as done:
        cli.main()
    streams = capsys.readouterr()
    return int(done.value.code or 0), streams.out, " ".join(streams.err.split())


def test_a_recipe_and_the_command_export_a_detector(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pictures, out = make_pictures(tmp_path / "pictures", count=3), tmp_path / "out"
    cfg = config_of("RetinaNet")
    cfg.merge_from_dict({**data_of(pictures, masks=False), "custom_hooks": []})
    cfg.dump(tmp_path / "dense.py")
    task = compress.mmdet.task(cfg)
    monkeypatch.setattr(task, "evaluate", lambda *_: {})  # of random weights
    recipe = {"budget": {"dims": "60%"}, "search": {"method": "magnitude"}, "timing": {"repeats": 3}, "export": "onnx"}
    pruned = compress.prune(detector_that_detects("RetinaNet"), recipe, task=task, workdir=out, quiet=True)
    report = pruned.report.export
    assert report["detections"]["images"] == 4 and report["detections"]["compared"] >= 10
    assert report["file"]["bytes"] < report["dense"]["bytes"]
    about = read_metadata(out / "model.onnx")
    assert about["plan"] == pruned.plan.digest() and about["pixels"] == "RGB, 0 to 255"
    assert about["classes"] == ["square", "disc"]
    assert count_agreeing_detections(pruned.model, out / "model.onnx", random_image(50, 71)) >= 5
    words = [out, "--mmdet", tmp_path / "dense.py", "--onnx", tmp_path / "a.onnx", "--part", "features", "--json"]
    code, text, error = run(monkeypatch, capsys, *words, "--images", pictures)
    assert code == 0, error
    assert json.loads(text)["max_rel_diff"] < 1e-4 and json.loads(text)["outputs"] == ["features_0", "features_1"]


def test_precisions_that_detectors_do_not_support_are_refused_before_the_start(tmp_path: Path) -> None:
    cfg = config_of("RetinaNet")
    cfg.merge_from_dict(data_of(make_pictures(tmp_path / "pictures", count=2), masks=False))
    recipe = {"budget": {"dims": "60%"}, "search": {"method": "magnitude"}, "export": {"half": True}}
    with pytest.raises(compress.NotReady, match="export: half and int8 are not supported for detectors"):
        compress.prune(
            detector_that_detects("RetinaNet"),
            recipe,
            task=compress.mmdet.task(cfg),
            workdir=tmp_path / "out",
            quiet=True,
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mmdet", "x.py", "--model", "timm:resnet18"], "--model or --mmdet: expected one of the two"),
        ([], "--model or --mmdet: expected one of the two"),
        (["--mmdet", "x.py", "--any-size"], "--any-size: not for --mmdet, whose files take pixels in any size"),
        (["--model", "timm:resnet18", "--part", "features"], "--part, --images, --cfg-options: only for --mmdet"),
        (["--mmdet", "CONFIG", "--images", "nowhere"], "--images nowhere: expected an image or a folder of them"),
        (["--mmdet", "CONFIG", "--images", __file__], "cannot be read as an image"),
        (["--mmdet", "CONFIG"], "val_dataloader: an export is compared on validation images, and the config has none"),
    ],
)
def test_mistakes_of_the_detector_export_command_are_named(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    cfg = config_of("RetinaNet")
    cfg.val_dataloader = None
    cfg.dump(tmp_path / "dense.py")
    (tmp_path / "saved").mkdir()
    given = [tmp_path / "dense.py" if word == "CONFIG" else word for word in words]
    code, _, error = run(monkeypatch, capsys, tmp_path / "saved", "--onnx", tmp_path / "a.onnx", *given)
    assert code == 2 and said in error, error


def test_a_config_in_the_saved_directory_is_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.py").write_text("raise SystemExit('the trap was run')")
    words = [tmp_path / "out", "--mmdet", tmp_path / "out" / ".." / "out" / "config.py", "--onnx", tmp_path / "a.onnx"]
    code, _, error = run(monkeypatch, capsys, *words)
    assert code == 2 and "is in the saved directory, and a config is Python code, which is not run from there" in error
