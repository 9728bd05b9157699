"""Detectors as files: how detections are paired, what is refused, the command and the recipe."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from detectors import data_of, make_pictures
from test_onnx_detectors import agree, config_of, lively, noise
from torch import nn

import compress
import compress.mmdet
from compress import cli
from compress.exporters import detector as exporter
from compress.exporters.match import Found, match
from compress.exporters.onnx import ExportError, plan_hash, read_metadata

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def found(*rows: tuple[float, float, int]) -> Found:
    """Boxes of ten pixels by where they begin, their score and label."""
    boxes = torch.tensor([[x, 0, x + 10, 10] for x, _, _ in rows]).reshape(-1, 4)
    return Found(boxes, torch.tensor([s for _, s, _ in rows]), torch.tensor([n for _, _, n in rows]))


@pytest.mark.parametrize(
    ("right", "here", "said"),
    [
        ([(0, 0.9, 1), (5, 0.8, 1)], [(5.2, 0.8, 1), (0.1, 0.9, 1)], ""),
        ([(0, 0.9, 1)], [(0.6, 0.9, 1)], r"the file does not find label 1 at \[0.0, 0.0, 10.0, 10.0\]"),
        ([(0, 0.9, 1)], [(0, 0.9, 2)], "the file does not find label 1"),
        ([(0, 0.9, 1)], [(0, 0.9, 1), (30, 0.4, 0)], "the file finds, and the detector does not, label 0"),
        ([(0, 0.9, 1)], [(0, 0.902, 1)], "the score of label 1 .* is 0.9020 in the file"),
        ([(0, 0.9, 1), (30, 0.04, 0)], [(0, 0.9, 1)], ""),
        ([(0, 0.9, 1), (30, 0.0505, 0)], [(0, 0.9, 1)], ""),
        ([(0, 0.9, 1), (30, 0.5, 0)], [(0, 0.9, 1), (60, 0.5, 0)], ""),
        ([], [], ""),
    ],
)
def test_detections_are_paired_in_both_directions(right: Any, here: Any, said: str) -> None:
    matched = match([("image 0", found(*right), found(*here))], least=0.05, most=2)
    assert bool(matched.wrong) == bool(said) and re.search(said, " ".join(matched.wrong))


def test_masks_that_share_too_little_are_wrong() -> None:
    mask = torch.zeros(1, 10, 10, dtype=torch.bool)
    mask[:, :5] = True
    one = found((0, 0.9, 1))
    pair = (Found(one.boxes, one.scores, one.labels, m) for m in (mask, mask.roll(1, 1)))
    matched = match([("image 0", *pair)])
    assert matched.overlap == pytest.approx(40 / 60) and "the mask of label 1" in matched.wrong[0]


def soft(detector: Any) -> None:
    detector.roi_head.test_cfg.nms = {"type": "soft_nms", "iou_threshold": 0.5}


def largest(detector: Any) -> None:
    detector.roi_head.bbox_roi_extractor.roi_layers[0].pool_mode = "max"


def own(detector: Any) -> None:
    kind = type(detector.roi_head)
    detector.roi_head.__class__ = type("Mine", (kind,), {})


def factors(detector: Any) -> None:
    detector.rpn_head.loss_centerness = nn.Identity()  # as the heads of FCOS and ATSS have it


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (soft, r"test_cfg.rcnn.nms: expected plain NMS with an iou_threshold; it has .*soft_nms"),
        (largest, r"roi_head.bbox_roi_extractor: RoIAlign is not known, or takes the largest"),
        (factors, r"rpn_head: RPNHead weighs its scores with something else that it predicts"),
        (own, r'roi_head: Mine is not known.*export part="features" instead'),
    ],
)
def test_what_is_not_known_is_named_and_features_offered(change: Callable[[Any], None], said: str) -> None:
    detector = lively("Faster R-CNN")
    change(detector)
    with pytest.raises(ExportError, match=said):
        exporter.export(detector, "never.onnx", noise(32, 32))


def test_images_of_another_kind_are_refused() -> None:
    detector = lively("Faster R-CNN")
    with pytest.raises(ExportError, match=r"images: expected pixels, uint8, RGB, .*; got float32\[1, 3, 8, 8\]"):
        exporter.export(detector, "never.onnx", torch.zeros(1, 3, 8, 8))
    with pytest.raises(ExportError, match="images: expected at least one; got none"):
        exporter.export(detector, "never.onnx", [])
    with pytest.raises(ExportError, match="part: expected one of detector, features; got 'neck'"):
        exporter.export(detector, "never.onnx", noise(8, 8), part="neck")


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
    recipe = {"budget": {"dims": "60%"}, "timing": {"repeats": 3}, "export": "onnx"}
    pruned = compress.prune(lively("RetinaNet"), recipe, task=task, workdir=out, quiet=True)
    report = pruned.report.export
    assert report["detections"]["images"] == 4 and report["detections"]["compared"] >= 10
    assert report["file"]["bytes"] < report["dense"]["bytes"]
    about = read_metadata(out / "model.onnx")
    assert about["plan"] == plan_hash(pruned.plan) and about["pixels"] == "RGB, 0 to 255"
    assert about["classes"] == ["square", "disc"]
    assert agree(pruned.model, out / "model.onnx", noise(50, 71)) >= 5
    words = [out, "--mmdet", tmp_path / "dense.py", "--onnx", tmp_path / "a.onnx", "--part", "features", "--json"]
    code, text, error = run(monkeypatch, capsys, *words, "--images", pictures)
    assert code == 0, error
    assert json.loads(text)["max_rel_diff"] < 1e-4 and json.loads(text)["outputs"] == ["features_0", "features_1"]


def test_precisions_that_detectors_do_not_have_are_told_before_the_start(tmp_path: Path) -> None:
    cfg = config_of("RetinaNet")
    cfg.merge_from_dict(data_of(make_pictures(tmp_path / "pictures", count=2), masks=False))
    recipe = {"budget": {"dims": "60%"}, "export": {"half": True}}
    with pytest.raises(compress.NotReady, match="export: half and int8 are not for detectors"):
        compress.prune(lively("RetinaNet"), recipe, task=compress.mmdet.task(cfg), workdir=tmp_path / "out", quiet=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mmdet", "x.py", "--model", "timm:resnet18"], "--model or --mmdet: expected one of the two"),
        ([], "--model or --mmdet: expected one of the two"),
        (["--mmdet", "x.py", "--any-size"], "--any-size: not for --mmdet, whose files take pixels in any size"),
        (["--model", "timm:resnet18", "--part", "features"], "--part, --images, --cfg-options: for --mmdet"),
        (["--mmdet", "CONFIG", "--images", "nowhere"], "--images nowhere: expected an image or a folder of them"),
        (["--mmdet", "CONFIG", "--images", __file__], "cannot be read as an image"),
        (["--mmdet", "CONFIG"], "val_dataloader: an export is compared on validation images, and the config has none"),
    ],
)
def test_the_command_says_what_to_mend(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    cfg = config_of("RetinaNet")
    cfg.val_dataloader = None
    cfg.dump(tmp_path / "dense.py")
    given = [tmp_path / "dense.py" if word == "CONFIG" else word for word in words]
    code, _, error = run(monkeypatch, capsys, tmp_path, "--onnx", tmp_path / "a.onnx", *given)
    assert code == 2 and said in error, error
