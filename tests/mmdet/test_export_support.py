"""Detectors that cannot be exported completely are named, and their features offered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from compress.exporters.errors import ExportError
from compress.mmdet import onnx_export as exporter
from helpers.tiny_detectors import detector_that_detects, random_image


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
        (largest, r"roi_head.bbox_roi_extractor: expected RoIAlign with square outputs and average pooling"),
        (factors, r"rpn_head: RPNHead multiplies its scores by another prediction"),
        (own, r'roi_head: Mine is not supported.*export part="features" instead'),
    ],
)
def test_what_is_not_known_is_named_and_features_offered(change: Callable[[Any], None], said: str) -> None:
    detector = detector_that_detects("Faster R-CNN")
    change(detector)
    with pytest.raises(ExportError, match=said):
        exporter.export(detector, "never.onnx", random_image(32, 32))
