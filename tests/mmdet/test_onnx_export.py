"""Exported detectors find what the detector finds, within tolerance, on images of any size."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import compress
import compress.mmdet
from compress.exporters import file_writer
from compress.exporters.errors import ExportError, ParityError
from compress.mmdet import onnx_export as exporter
from compress.recipe import Timing

# isort: split
from mmdet.structures import DetDataSample

from helpers.tiny_detectors import (
    count_agreeing_detections,
    detector_that_detects,
    random_image,
    run_in_onnxruntime,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BRIEF = Timing(repeats=3)


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Any]:
    """A Cascade Mask R-CNN on a narrow Swin, cut, and its file."""
    compact = cut(
        detector_that_detects("Cascade Mask R-CNN"), {"channels": False, "attention": True, "mlp": True}
    ).model
    path = tmp_path_factory.mktemp("cascade") / "detector.onnx"
    return compact, path, exporter.export(compact, path, [random_image(64, 64), random_image(75, 101, 1)], timing=BRIEF)


def cut(dense: nn.Module, target: dict[str, Any]) -> compress.Pruned:
    """Without training: 60 % of the dimensions of the backbone left."""
    recipe = {"target": {**target, "include": ["backbone"]}, "budget": {"dims": "60%"}}
    recipe |= {"search": {"method": "magnitude"}, "timing": {"repeats": 3}}
    sample = DetDataSample(metainfo={"img_shape": (64, 64), "ori_shape": (64, 64), "scale_factor": (1.0, 1.0)})
    inputs = {"inputs": torch.randn(1, 3, 64, 64), "data_samples": [sample], "mode": "predict"}
    return compress.prune(dense, recipe, example_inputs=inputs, quiet=True)


def changed(path: Path, target: Path, names: str, by: list[float]) -> Path:
    """The file with other numbers in some of its weights."""
    file, count = onnx.load(path), 0
    for weight in file.graph.initializer:
        if re.search(names, weight.name):
            more = numpy_helper.to_array(weight) + np.float32(by)
            weight.CopyFrom(numpy_helper.from_array(more, weight.name))
            count += 1
    assert count
    onnx.save(file, target)
    return target


def test_a_compact_cascade_with_masks_runs_in_onnxruntime_on_images_of_any_size(cascade: tuple[Any, Path, Any]) -> None:
    compact, path, report = cascade
    assert report.inputs == {"image": [1, 3, "height", "width"]}
    assert report.outputs == ["boxes", "scores", "labels", "masks"]
    assert report.detections.images == 3 and report.detections.compared >= 20 and report.detections.overlap > 0.99
    assert (
        count_agreeing_detections(
            compact, path, random_image(33, 97, 2), random_image(130, 67, 3), random_image(32, 32, 4)
        )
        >= 20
    )
    file = onnx.load(path)
    assert {"NonMaxSuppression", "RoiAlign", "TopK"} <= {node.op_type for node in file.graph.node}
    assert {node.domain for node in file.graph.node} == {""} and not file.functions
    assert "detections on 3 images" in str(report.rows())
    assert type(report).from_dict(report.to_dict()) == report


def test_a_file_with_another_weight_is_caught(cascade: tuple[Any, Path, Any], tmp_path: Path) -> None:
    compact, path, _ = cascade
    broken = changed(path, tmp_path / "broken.onnx", r"bbox_head\.1\.fc_cls\.bias$", [0.3, 0, 0, 0])
    with pytest.raises(ParityError, match=r"image 0: .*label \d at \[.* The tolerance is 0.5 px, 0.001 of a score"):
        exporter.check(compact, broken, random_image(64, 64))
    broken = changed(path, tmp_path / "broken.onnx", r"mask_head\.1\.conv_logits\.bias$", [0.5, 0.5, 0.5])
    with pytest.raises(ParityError, match=r"the mask of label \d at .* shares 0\.\d+ with that of the file"):
        exporter.check(compact, broken, [random_image(64, 64, seed) for seed in range(4)])


def test_nothing_found_is_an_empty_result(cascade: tuple[Any, Path, Any], tmp_path: Path) -> None:
    compact, path, _ = cascade
    empty = changed(path, tmp_path / "empty.onnx", r"bbox_head\.\d\.fc_cls\.bias$", [0, 0, 0, 1000])
    found = run_in_onnxruntime(empty, random_image(64, 75))
    assert found.masks is not None
    assert [*map(list, (t.shape for t in (found.boxes, found.scores, found.labels, found.masks)))] == [
        [0, 4],
        [0],
        [0],
        [0, 64, 75],
    ]
    blind = copy.deepcopy(compact)
    for head in blind.roi_head.bbox_head:
        head.fc_cls.bias.data[-1] += 1000
    with pytest.raises(ExportError, match=r"there is nothing to compare: neither .* above 0.05 on the 1 given"):
        exporter.check(blind, empty, random_image(64, 64))


def test_faster_rcnn_agrees_and_a_faulty_export_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detector, path, kept = detector_that_detects("Faster R-CNN"), tmp_path / "detector.onnx", []
    right = file_writer.lower_to_onnx
    monkeypatch.setattr(file_writer, "lower_to_onnx", lambda *args, **how: kept.append(right(*args, **how)) or kept[0])
    report = exporter.export(detector, path, random_image(64, 64), timing=BRIEF)
    assert report.detections is not None and report.detections.compared >= 10
    assert count_agreeing_detections(detector, path, random_image(50, 71)) >= 5
    path.unlink()
    monkeypatch.setattr(file_writer, "lower_to_onnx", lambda *args, **how: kept[0])  # a graph with weights of before
    detector.roi_head.bbox_head.fc_reg.bias.data += 0.5
    with pytest.raises(ParityError, match="image 0: the file"):
        exporter.export(detector, path, random_image(64, 64), timing=BRIEF)
    assert not list(tmp_path.iterdir())


def test_features_of_a_swin_have_any_batch_and_any_size(cascade: tuple[Any, Path, Any], tmp_path: Path) -> None:
    compact, path = cascade[0], tmp_path / "features.onnx"
    odd = random_image(75, 101)
    report = exporter.export(compact, path, [random_image(64, 64), odd], part="features", timing=BRIEF)
    assert report.inputs == {"image": ["batch", 3, "height", "width"]} and report.max_rel_diff is not None
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    images = torch.cat([odd, odd.flip(3), odd.flip(2)])
    data = compact.data_preprocessor({"inputs": [image.flip(0) for image in images], "data_samples": None})
    with torch.no_grad():
        expected = compact.extract_feat(data["inputs"])
    for got, right in zip(session.run(None, {"image": images.numpy()}), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(got), right, rtol=1e-4, atol=1e-4)
