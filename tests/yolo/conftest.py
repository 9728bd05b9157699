"""Data of each task, made once; every test of this folder needs ultralytics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.yolo_data import make_data

SPECS = {
    "detect": "yolov8n.yaml",
    "segment": "yolo11n-seg.yaml",
    "pose": "yolov8n-pose.yaml",
    "obb": "yolo11n-obb.yaml",
    "classify": "yolo11n-cls.yaml",
}


@pytest.fixture(scope="session")
def yolo_data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(task: str) -> Path:
        if task not in made:
            made[task] = make_data(tmp_path_factory.mktemp(task), task)
        return made[task]

    return make


@pytest.fixture
def yolo_model() -> Callable[[str], Any]:
    """Build the YOLO of a task for two classes, with the same weights each time."""
    from compress import yolo

    def build(task: str = "detect") -> Any:
        torch.manual_seed(0)
        return yolo.build(SPECS[task], classes=2)

    return build
