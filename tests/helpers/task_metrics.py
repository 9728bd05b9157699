"""Metrics and gradients of the tasks of two processes, each of which reads its share of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import compress
from compress.distributed import init_process_group, rank
from compress.progress import ProgressDisplay
from compress.training import Engine, GradientComputer
from helpers.shapes import Shapes, box_loaders, small_detector


def engine() -> Engine:
    return Engine(torch.device("cpu"), 0, ProgressDisplay(True))


def segmentation_task() -> tuple[compress.Task, nn.Module, list[Any]]:
    """Return a task, a layer and its batches, of which the second has half of the counted pixels of the first."""
    torch.manual_seed(0)
    batches = list(DataLoader(Shapes(4, 16), 2))
    batches[1][1][:, :8] = 255
    return compress.Segmentation(class_weights=[0.5, 1.0, 2.0], dice=1.0), nn.Conv2d(3, 3, 3, padding=1), batches


def detection_metrics() -> dict[str, float]:
    """Return the metrics of a detector with fresh weights, of this process's share of the images."""
    _, val = box_loaders(6)
    model = small_detector("RetinaNet")
    return engine().evaluate(compress.Detection(None, val), model)


def task_metrics(folder: Path) -> dict[str, Any]:
    """Return what a process finds: metrics of segmentation and detection, and the gradient of a segmentation."""
    init_process_group(cpu=True)
    task, layer, batches = segmentation_task()
    weights = list(layer.parameters())
    counts = {"task": task.count_targets}
    found = GradientComputer().gradients(
        lambda part: {"task": task.loss(layer(part[0]), part)}, tuple(batches[rank()]), weights, counts=counts
    )
    return {
        "segmentation": engine().evaluate(task, layer, data=[batches[rank()]]),
        "detection": detection_metrics(),
        "gradient": torch.cat([gradient.flatten() for gradient in found.gradients]).tolist(),
    }
