"""What mmdet's own code finds on an image: the measure of an exported detector."""

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

from ..exporters.match import Found


@torch.no_grad()
def predict(detector: Any, image: Tensor) -> Found:
    """Detections on one image, RGB pixels of (1, 3, height, width), in its own coordinates."""
    size = (image.shape[2], image.shape[3])
    sample = DetDataSample(metainfo={"img_shape": size, "ori_shape": size, "scale_factor": (1.0, 1.0)})
    data = detector.data_preprocessor({"inputs": [image[0].flip(0)], "data_samples": [sample]}, False)  # BGR, as loaded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of mmdet's own ways with masks
        found = detector(**data, mode="predict")[0].pred_instances.cpu()
    return Found(found.bboxes, found.scores, found.labels, found.get("masks"))


def limits(detector: Any) -> tuple[float, float, int | None]:
    """The threshold of masks, the least score of a detection, and how many there are at the most."""
    config = (detector.roi_head if hasattr(detector, "roi_head") else detector.bbox_head).test_cfg
    return float(config.get("mask_thr_binary", 0.5)), float(config.get("score_thr", 0)), config.get("max_per_img")


def pictures(cfg: Config, paths: Iterable[str | Path]) -> list[Tensor]:
    """Images as the config's test pipeline hands them to the detector: in its size, RGB pixels.

    Raises:
        ValueError: one cannot be read.
    """
    steps = [step for step in get_test_pipeline_cfg(cfg) if "Annotations" not in str(step["type"])]
    pipeline, found = Compose(steps), []
    for path in paths:
        try:
            data = pipeline({"img_path": str(path), "img_id": 0})
        except Exception as error:  # of whatever reads the file
            raise ValueError(f"--images {path}: cannot be read as an image: {error}") from error
        found.append(data["inputs"].flip(0))  # it loads BGR
    return found
