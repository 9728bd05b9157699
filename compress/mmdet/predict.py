"""Detections of mmdet's own code on an image: the reference that an exported detector is compared with."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from mmcv.transforms import Compose
from mmdet.structures import DetDataSample
from mmdet.utils import get_test_pipeline_cfg
from mmengine.config import Config
from torch import Tensor

from compress.exporters import DetectionLimits, Detections


@torch.no_grad()
def predict(detector: Any, image: Tensor) -> Detections:
    """Return the detections on one image, RGB pixels of shape (1, 3, height, width), in its own coordinates."""
    size = (image.shape[2], image.shape[3])
    sample = DetDataSample(metainfo={"img_shape": size, "ori_shape": size, "scale_factor": (1.0, 1.0)})
    bgr = image[0].flip(0)  # mmdet loads images as BGR
    data = detector.data_preprocessor({"inputs": [bgr], "data_samples": [sample]}, False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from mmdet's code for masks
        instances = detector(**data, mode="predict")[0].pred_instances.cpu()
    return Detections(instances.bboxes, instances.scores, instances.labels, instances.get("masks"))


def detection_limits(detector: Any) -> DetectionLimits:
    """Return the limits in the detector's test config."""
    config = (detector.roi_head if hasattr(detector, "roi_head") else detector.bbox_head).test_cfg
    return DetectionLimits(
        min_score=float(config.get("score_thr", 0)),
        max_detections=config.get("max_per_img"),
        mask_threshold=float(config.get("mask_thr_binary", 0.5)),
    )


def load_images(cfg: Config, paths: Iterable[str | Path]) -> list[Tensor]:
    """Load images through the config's test pipeline: resized as the detector expects, RGB pixels.

    Raises:
        ValueError: a file cannot be read as an image.
    """
    steps = [step for step in get_test_pipeline_cfg(cfg) if "Annotations" not in str(step["type"])]
    pipeline, images = Compose(steps), []
    for path in paths:
        try:
            data = pipeline({"img_path": str(path), "img_id": 0})
        except Exception as error:  # the exception depends on the image library
            raise ValueError(f"--images {path}: cannot be read as an image: {error}") from error
        images.append(data["inputs"].flip(0))  # mmdet loads images as BGR
    return images
