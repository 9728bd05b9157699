"""Detectors as files: our path finds what mmdet finds, to the bit; the file what our path finds, within tolerance."""

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
from torch import Tensor, nn

import compress
import compress.mmdet
from compress.exporters import detector as exporter
from compress.exporters import onnx as onnx_exporter
from compress.exporters.match import Found
from compress.exporters.onnx import ExportError, ParityError
from compress.mmdet.boxes import paste
from compress.mmdet.predict import predict
from compress.mmdet.whole import Detector
from compress.recipe import Timing

# isort: split
from mmdet.structures import DetDataSample

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BRIEF = Timing(repeats=3)
LEVELS = {"type": "FPN", "out_channels": 16, "num_outs": 2}
SWIN = {
    "type": "SwinTransformer",
    "embed_dims": 16,
    "depths": [1, 2],
    "strides": (4, 2),
    "num_heads": [2, 2],
    "out_indices": (0, 1),
    "drop_path_rate": 0.0,
}
RESNET = {
    "type": "ResNet",
    "depth": 18,
    "base_channels": 8,
    "num_stages": 2,
    "strides": (1, 2),
    "dilations": (1, 1),
    "out_indices": (0, 1),
}
ANCHORS = {"type": "AnchorGenerator", "scales": [4], "ratios": [0.5, 1.0, 2.0], "strides": [4, 8]}
CONFIGS = {
    "Cascade Mask R-CNN": "cascade-mask-rcnn_swin-t-p4-w7_fpn_3x_coco",
    "Mask R-CNN": "mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py",
    "Faster R-CNN": "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py",
    "RetinaNet": "mmdet::swin/retinanet_swin-t-p4-w7_fpn_1x_coco.py",
    "RTMDet": "mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py",
}


def config_of(name: str) -> Any:
    """The config that a recipe is for: two narrow stages, two levels, three classes, two heads in a cascade."""
    cfg = compress.mmdet.read(CONFIGS[name], {"log_level": "ERROR"})
    model = cfg.model
    if name == "RTMDet":
        cfg.merge_from_dict({"model.backbone.init_cfg": None, "model.bbox_head.num_classes": 3})
        return cfg
    plain = name in ("Faster R-CNN", "RetinaNet")
    model.backbone = RESNET if plain else SWIN
    model.neck = {**LEVELS, "in_channels": [8, 16] if plain else [16, 32]}
    cfg.test_dataloader.dataset.pipeline[1].scale = (64, 64)
    if name == "RetinaNet":
        small = {"in_channels": 16, "feat_channels": 16, "stacked_convs": 1, "num_classes": 3}
        model.bbox_head = {**model.bbox_head, **small, "anchor_generator": dict(ANCHORS)}
        model.test_cfg.update({"nms_pre": 60, "max_per_img": 15})
        return cfg
    model.rpn_head.update({"in_channels": 16, "feat_channels": 16, "anchor_generator": ANCHORS})
    model.test_cfg.rpn.update({"nms_pre": 60, "max_per_img": 20})
    model.test_cfg.rcnn.update({"max_per_img": 10})
    roi = model.roi_head
    if "num_stages" in roi:
        roi.update({"num_stages": 2, "stage_loss_weights": [1, 0.5], "bbox_head": roi.bbox_head[:2]})
        model.train_cfg.rcnn = model.train_cfg.rcnn[:2]
    for head in roi.bbox_head if isinstance(roi.bbox_head, list) else [roi.bbox_head]:
        head.update({"in_channels": 16, "fc_out_channels": 24, "num_classes": 3})
        if "conv_out_channels" in head:
            head.update({"conv_out_channels": 16, "num_shared_convs": 1})
    for part in ("bbox", "mask"):
        if f"{part}_roi_extractor" in roi:
            roi[f"{part}_roi_extractor"].update({"out_channels": 16, "featmap_strides": [4, 8], "finest_scale": 8})
    if "mask_head" in roi:
        roi.mask_head.update({"in_channels": 16, "conv_out_channels": 8, "num_convs": 1, "num_classes": 3})
    return cfg


def lively(name: str) -> Any:
    """A detector with random weights that is sure of many things, and of no two alike."""
    torch.manual_seed(0)
    detector = compress.mmdet.build(config_of(name))
    spread = {
        r"(fc_cls|retina_cls|rtm_cls\.\d)": 0.6,
        r"rpn_cls": 0.3,
        r"(fc|retina|rpn)_reg": 0.05,
        "conv_logits": 0.5,
    }
    for path, module in detector.named_modules():
        for pattern, deviation in spread.items():
            if re.search(f"{pattern}$", path) and isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.normal_(module.weight, std=deviation)
                nn.init.normal_(module.bias, -2 if path.startswith("bbox_head") else 0, 0.1)
    for module in detector.modules():  # the `eval` of mmdet's Swin gives nothing back
        module.training = False
    return detector


def noise(height: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, 256, (1, 3, height, width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_our_path_finds_what_mmdet_finds_to_the_bit(name: str) -> None:
    detector = lively(name)
    ours, count = Detector(detector), 0
    for size in ((64, 64), (96, 128) if name == "RTMDet" else (75, 101)):  # it takes multiples of 32 only
        right, image = predict(detector, noise(*size)), noise(*size)
        with torch.no_grad():
            here = ours(image)
        for key in ("boxes", "scores", "labels"):
            assert torch.equal(here[key], getattr(right, key)), key
        assert (right.masks is None) == ("masks" not in here)
        if right.masks is not None:
            assert float((here["masks"] == right.masks).float().mean()) > 0.9999
        count += int((right.scores > 0.05).sum())
    assert count >= 8


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Any]:
    """A Cascade Mask R-CNN on a narrow Swin, cut, and its file."""
    compact = cut(lively("Cascade Mask R-CNN"), {"channels": False, "attention": True, "mlp": True}).model
    path = tmp_path_factory.mktemp("cascade") / "detector.onnx"
    return compact, path, exporter.export(compact, path, [noise(64, 64), noise(75, 101, 1)], timing=BRIEF)


def cut(dense: nn.Module, target: dict[str, Any]) -> compress.Pruned:
    """Without training: 60 % of the dimensions of the backbone left."""
    recipe = {"target": {**target, "include": ["backbone"]}, "budget": {"dims": "60%"}, "timing": {"repeats": 3}}
    sample = DetDataSample(metainfo={"img_shape": (64, 64), "ori_shape": (64, 64), "scale_factor": (1.0, 1.0)})
    inputs = {"inputs": torch.randn(1, 3, 64, 64), "data_samples": [sample], "mode": "predict"}
    return compress.prune(dense, recipe, example_inputs=inputs, quiet=True)


def in_runtime(path: Path, image: Tensor) -> Found:
    """The file as a stranger runs it."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    return Found(**{o.name: torch.from_numpy(a) for o, a in zip(session.get_outputs(), outputs, strict=True)})


def agree(detector: nn.Module, path: Path, *images: Tensor) -> int:
    """Detections in the same order, one by one, without our own pairing."""
    count = 0
    for image in images:
        right, here = predict(detector, image), in_runtime(path, image)
        assert torch.equal(right.labels, here.labels)
        assert float((right.boxes - here.boxes).abs().max()) < 0.01
        assert float((right.scores - here.scores).abs().max()) < 1e-4
        if right.masks is not None and here.masks is not None:
            shared, either = (right.masks & here.masks).sum((1, 2)), (right.masks | here.masks).sum((1, 2))
            assert bool((shared >= 0.99 * either).all())
        count += int((right.scores > 0.05).sum())
    return count


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
    assert agree(compact, path, noise(33, 97, 2), noise(130, 67, 3), noise(32, 32, 4)) >= 20
    file = onnx.load(path)
    assert {"NonMaxSuppression", "RoiAlign", "TopK"} <= {node.op_type for node in file.graph.node}
    assert {node.domain for node in file.graph.node} == {""} and not file.functions
    assert "detections on 3 images" in str(report.rows())
    assert type(report).from_dict(report.to_dict()) == report


def test_a_file_with_another_weight_is_caught(cascade: tuple[Any, Path, Any], tmp_path: Path) -> None:
    compact, path, _ = cascade
    broken = changed(path, tmp_path / "broken.onnx", r"bbox_head\.1\.fc_cls\.bias$", [0.3, 0, 0, 0])
    with pytest.raises(ParityError, match=r"image 0: .*label \d at \[.* At most 0.5 px, 0.001 of a score"):
        exporter.check(compact, broken, noise(64, 64))
    broken = changed(path, tmp_path / "broken.onnx", r"mask_head\.1\.conv_logits\.bias$", [0.5, 0.5, 0.5])
    with pytest.raises(ParityError, match=r"the mask of label \d at .* shares 0\.\d+ with that of the file"):
        exporter.check(compact, broken, [noise(64, 64, seed) for seed in range(4)])


def test_nothing_found_is_an_empty_result(cascade: tuple[Any, Path, Any], tmp_path: Path) -> None:
    compact, path, _ = cascade
    empty = changed(path, tmp_path / "empty.onnx", r"bbox_head\.\d\.fc_cls\.bias$", [0, 0, 0, 1000])
    found = in_runtime(empty, noise(64, 75))
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
        exporter.check(blind, empty, noise(64, 64))


def test_faster_rcnn_agrees_and_a_faulty_export_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detector, path, kept = lively("Faster R-CNN"), tmp_path / "detector.onnx", []
    right = onnx_exporter.lower
    monkeypatch.setattr(onnx_exporter, "lower", lambda *args, **how: kept.append(right(*args, **how)) or kept[0])
    report = exporter.export(detector, path, noise(64, 64), timing=BRIEF)
    assert report.detections is not None and report.detections.compared >= 10
    assert agree(detector, path, noise(50, 71)) >= 5
    path.unlink()
    monkeypatch.setattr(onnx_exporter, "lower", lambda *args, **how: kept[0])  # a graph with weights of before
    detector.roi_head.bbox_head.fc_reg.bias.data += 0.5
    with pytest.raises(ParityError, match="image 0: the file"):
        exporter.export(detector, path, noise(64, 64), timing=BRIEF)
    assert not list(tmp_path.iterdir())


def test_features_of_a_swin_have_any_batch_and_any_size(cascade: tuple[Any, Path, Any], tmp_path: Path) -> None:
    compact, path = cascade[0], tmp_path / "features.onnx"
    odd = noise(75, 101)
    report = exporter.export(compact, path, [noise(64, 64), odd], part="features", timing=BRIEF)
    assert report.inputs == {"image": ["batch", 3, "height", "width"]} and report.max_rel_diff is not None
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    images = torch.cat([odd, odd.flip(3), odd.flip(2)])
    data = compact.data_preprocessor({"inputs": [image.flip(0) for image in images], "data_samples": None})
    with torch.no_grad():
        expected = compact.extract_feat(data["inputs"])
    for got, right in zip(session.run(None, {"image": images.numpy()}), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(got), right, rtol=1e-4, atol=1e-4)


def test_masks_in_the_frame_of_their_boxes_are_pasted_to_the_same_maps() -> None:
    detector, image = lively("Mask R-CNN"), noise(75, 101)
    with torch.no_grad():
        found, pasted = Detector(detector, pasted=False)(image), Detector(detector)(image)
    assert found["masks"].shape == (len(found["boxes"]), 28, 28)
    assert torch.equal(paste(found["masks"], found["boxes"], 75, 101) >= 0.5, pasted["masks"])


def test_a_pasted_mask_is_what_grid_sampling_gives() -> None:
    torch.manual_seed(0)
    masks, boxes = torch.rand(3, 28, 28), torch.tensor([[3.2, 4.1, 30.7, 20.0], [0, 0, 40, 24], [10, 10, 10.0, 15]])
    place = [torch.arange(n) + 0.5 for n in (24, 40)]
    corner, extent = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
    y, x = ((place[i] - corner[:, 1 - i, None]) / extent[:, 1 - i, None] * 2 - 1 for i in (0, 1))
    grid = torch.stack([x[:, None].expand(3, 24, 40), y[:, :, None].expand(3, 24, 40)], 3)
    right = nn.functional.grid_sample(masks[:, None], grid, align_corners=False)[:, 0]
    torch.testing.assert_close(paste(masks, boxes, 24, 40)[:2], right[:2], rtol=1e-4, atol=1e-5)
    assert bool(paste(masks, boxes, 24, 40)[2].isfinite().all())
