"""Average precision of boxes, by pycocotools."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor

from compress.distributed import all_gather_object
from compress.errors import BatchError

METRICS = {"ap": 0, "ap50": 1, "ap75": 2}  # by name: position in pycocotools' summary
INSTALL = 'average precision needs pycocotools; install it: pip install "compress[detection]"'

Boxes = Mapping[str, Tensor]  # of one image, on the CPU: boxes (x1, y1, x2, y2) and labels; scores of detections


def can_measure() -> bool:
    """Return whether pycocotools is installed."""
    return importlib.util.find_spec("pycocotools") is not None


def average_precision_over_processes(detections: Sequence[Boxes], targets: Sequence[Boxes]) -> dict[str, float]:
    """Return the average precision on the images of all processes.

    Raises:
        BatchError: no image has a target.
        ImportError: pycocotools is not installed.
    """
    parts = all_gather_object((list(detections), list(targets)))
    all_detections, all_targets = ([image for part in parts for image in part[side]] for side in (0, 1))
    if not sum(len(image["boxes"]) for image in all_targets):
        raise BatchError("val: expected at least one image with a box; the loader gave none")
    return average_precision(all_detections, all_targets)


def average_precision(detections: Sequence[Boxes], targets: Sequence[Boxes]) -> dict[str, float]:
    """Return AP over IoU 0.5 to 0.95, at 0.5 and at 0.75, as COCO defines them; at least one target is needed.

    Args:
        detections: of each image: boxes, labels and scores.
        targets: of each image: boxes and labels; also `iscrowd` and `area`, if it has them.

    Raises:
        ImportError: pycocotools is not installed.
    """
    if not can_measure():
        raise ImportError(INSTALL)
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if not sum(len(image["boxes"]) for image in detections):
        return dict.fromkeys(METRICS, 0.0)
    with redirect_stdout(io.StringIO()):  # it prints
        truth = COCO()
        truth.dataset = _as_coco(targets, detections)
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(_result_rows(detections)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: float(evaluation.stats[position]) for name, position in METRICS.items()}


def _as_coco(targets: Sequence[Boxes], detections: Sequence[Boxes]) -> dict[str, Any]:
    """Return targets as a dataset of COCO; annotations count from 1, because 0 stands for no match there."""
    annotations: list[dict[str, Any]] = []
    for image, target in enumerate(targets):
        corners = target["boxes"].double()
        sizes = corners[:, 2:] - corners[:, :2]
        areas = target["area"] if "area" in target else sizes.prod(1)
        crowds = target["iscrowd"] if "iscrowd" in target else torch.zeros(len(corners))
        rows = zip(torch.cat([corners[:, :2], sizes], 1).tolist(), target["labels"], areas, crowds, strict=True)
        for box, label, area, crowd in rows:
            annotation = {"id": len(annotations) + 1, "image_id": image, "category_id": int(label), "bbox": box}
            annotations.append(annotation | {"area": float(area), "iscrowd": int(crowd)})
    labels = {int(label) for image in (*targets, *detections) for label in image["labels"]}
    return {
        "info": {},
        "images": [{"id": image} for image in range(len(targets))],
        "categories": [{"id": label} for label in sorted(labels)],
        "annotations": annotations,
    }


def _result_rows(detections: Sequence[Boxes]) -> Any:
    """Return detections as rows of image, left, top, width, height, score and label."""
    rows = []
    for image, found in enumerate(detections):
        corners = found["boxes"].double()
        columns = [corners[:, :2], corners[:, 2:] - corners[:, :2], found["scores"].double()[:, None]]
        numbers = torch.full((len(corners), 1), float(image), dtype=torch.float64)
        rows.append(torch.cat([numbers, *columns, found["labels"].double()[:, None]], 1))
    return torch.cat(rows).numpy()
