"""Tiny detectors of every family that exports to ONNX, with weights that detect something."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch
from torch import Tensor, nn

import compress
import compress.mmdet
from compress.exporters.detection_match import Detections
from compress.mmdet.predict import predict

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


def detector_that_detects(name: str) -> Any:
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


def random_image(height: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, 256, (1, 3, height, width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )


def run_in_onnxruntime(path: Path, image: Tensor) -> Detections:
    """The file as a stranger runs it."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    return Detections(**{o.name: torch.from_numpy(a) for o, a in zip(session.get_outputs(), outputs, strict=True)})


def count_agreeing_detections(detector: nn.Module, path: Path, *images: Tensor) -> int:
    """Detections in the same order, one by one, without our own pairing."""
    count = 0
    for image in images:
        right, here = predict(detector, image), run_in_onnxruntime(path, image)
        assert torch.equal(right.labels, here.labels)
        assert float((right.boxes - here.boxes).abs().max()) < 0.01
        assert float((right.scores - here.scores).abs().max()) < 1e-4
        if right.masks is not None and here.masks is not None:
            shared, either = (right.masks & here.masks).sum((1, 2)), (right.masks | here.masks).sum((1, 2))
            assert bool((shared >= 0.99 * either).all())
        count += int((right.scores > 0.05).sum())
    return count
