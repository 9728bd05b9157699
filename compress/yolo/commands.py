"""Function behind the command line's `--yolo`: build a YOLO and its task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from .datasets import read_data
from .families import family_of
from .networks import YAML_SUFFIXES, build
from .settings import parse_settings
from .yolo_task import YoloTask, yolo_task


def build_for_command(
    spec: str, data: str | None, options: Sequence[str], trust_pickle: bool, seed: int
) -> tuple[nn.Module, YoloTask]:
    """Build the network of a YAML or a checkpoint, and its task on a data YAML.

    Args:
        spec: as for `build`; a YAML is built for the classes and keypoints of the data, as Ultralytics does.
        options: Ultralytics' settings, as given to `--cfg-options`.

    Raises:
        ValueError: the network, the data or a setting cannot be used.
    """
    if data is None:
        raise ValueError("--data: expected a data YAML for --yolo, such as coco128.yaml; got none")
    settings = parse_settings(options)
    model = build(spec, trust_pickle=trust_pickle)
    if Path(spec).suffix.lower() in YAML_SUFFIXES:
        content = read_data(data, family_of(model.model))
        model = build(spec, classes=content["nc"], keypoints=content.get("kpt_shape"))
    task = yolo_task(model, data=data, seed=seed, **settings)
    return model.model, task
