"""Function behind the command line's `--yolo`: build a YOLO and its task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from .networks import YAML_SUFFIXES, build
from .settings import parse_settings
from .yolo_task import YoloTask, classes_of, yolo_task


def build_for_command(
    spec: str, data: str | None, options: Sequence[str], trust_pickle: bool, seed: int
) -> tuple[nn.Module, YoloTask]:
    """Build the network of a YAML or a checkpoint, and its task on a data YAML.

    Args:
        spec: as for `build`; a YAML is built for the classes of the data, as Ultralytics does.
        options: Ultralytics' settings, as given to `--cfg-options`.

    Raises:
        ValueError: the network, the data or a setting cannot be used.
    """
    if data is None:
        raise ValueError("--data: expected a data YAML for --yolo, such as coco128.yaml; got none")
    settings = parse_settings(options)
    model = build(spec, trust_pickle=trust_pickle)
    classes = classes_of(model, data)
    if Path(spec).suffix.lower() in YAML_SUFFIXES and classes != len(model.model.names):
        model = build(spec, classes=classes)
    task = yolo_task(model, data=data, seed=seed, **settings)
    return model.model, task
