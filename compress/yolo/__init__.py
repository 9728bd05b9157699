"""Prune Ultralytics' YOLO and RT-DETR: tasks from data YAMLs, fine-tuned and evaluated by Ultralytics' own classes.

This is the only package that imports ultralytics, apart from the compact forms of its attention. Ultralytics has a
licence of its own, AGPL-3.0; it is not installed with this library unless you ask for the extra `yolo`.
"""

from .requirement import check_ultralytics

check_ultralytics()  # before the modules below, which import ultralytics

from .networks import build  # noqa: E402
from .pruned_yolo import PrunedYOLO, load, save  # noqa: E402
from .yolo_task import YoloTask  # noqa: E402
from .yolo_task import yolo_task as task  # noqa: E402

__all__ = ["PrunedYOLO", "YoloTask", "build", "load", "save", "task"]
