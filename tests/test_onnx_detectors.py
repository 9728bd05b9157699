"""Detectors as files: our path finds what mmdet finds, to the bit; the file what our path finds, within tolerance."""

from __future__ import annotations

import re
from collections.abc import Callable
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
from compress.exporters.match import Found, match
from compress.exporters.onnx import ExportError, ParityError
from compress.mmdet.boxes import paste
from compress.mmdet.predict import predict
from compress.mmdet.whole import Detector, Features
from compress.recipe import Timing

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BRIEF = Timing(repeats=3)
LEVELS = {"type": "FPN", "out_channels": 16, "num_outs": 2}
SWIN = {
    "type": "SwinTransformer",
    "embed_dims": 16,
    "depths": [2, 2],
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
    """The config that a recipe is for, with two narrow stages, two levels and three classes."""
    cfg = compress.mmdet.read(CONFIGS[name], {"log_level": "ERROR"})
    model = cfg.model
    if name == "RTMDet":
        cfg.merge_from_dict({"model.backbone.init_cfg": None, "model.bbox_head.num_classes": 3})
        return cfg
    model.backbone = RESNET if name == "Faster R-CNN" else SWIN
    model.neck = {**LEVELS, "in_channels": [8, 16] if name == "Faster R-CNN" else [16, 32]}
    if name == "RetinaNet":
        small = {"in_channels": 16, "feat_channels": 16, "stacked_convs": 1, "num_classes": 3}
        model.bbox_head.update({**small, "anchor_generator": ANCHORS})
        model.test_cfg.update({"nms_pre": 60, "max_per_img": 15})
        return cfg
    model.rpn_head.update({"in_channels": 16, "feat_channels": 16, "anchor_generator": ANCHORS})
    model.test_cfg.rpn.update({"nms_pre": 60, "max_per_img": 20})
    model.test_cfg.rcnn.update({"max_per_img": 10})
    roi = model.roi_head
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
    spread = {r"(fc_cls|retina_cls|rtm_cls\.\d)": 0.6, r"rpn_cls": 0.3, r"(fc|retina|rpn)_reg": 0.05, "conv_logits": 0.5}
    for path, module in detector.named_modules():
        for pattern, deviation in spread.items():
            if re.search(f"{pattern}$", path) and isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.normal_(module.weight, std=deviation)
    for module in detector.modules():  # the `eval` of mmdet's Swin gives nothing back
        module.training = False
    return detector


def noise(height: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (1, 3, height, width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.parametrize("name", CONFIGS)
def test_our_path_finds_what_mmdet_finds_to_the_bit(name: str) -> None:
    detector = lively(name)
    ours, count = Detector(detector), 0
    for size in ((64, 64), (75, 101)):
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


if __name__ == "__main__":
    import sys
    import time

    for name in sys.argv[1:] or CONFIGS:
        d = lively(name)
        start = time.time()
        report = exporter.export(d, "/tmp/wt/detexport/scratch/t.onnx", [noise(64, 64), noise(75, 101)], timing=BRIEF)
        print(name, time.time() - start, report.detections, report.file)
