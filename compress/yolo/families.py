"""The families of Ultralytics' networks: each with its trainer, validator and predictor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from ultralytics.models import rtdetr, yolo
from ultralytics.nn import tasks

ADVICE = (
    "Networks for detection, segmentation, poses, oriented boxes and classification, and RT-DETR, can be pruned here"
)


@dataclass(frozen=True)
class Family:
    """One kind of network with the classes that Ultralytics trains and evaluates it with."""

    task: str  # as Ultralytics names it
    network: type[Any]
    trainer: type[Any]
    validator: type[Any]
    predictor: type[Any]
    heads: tuple[str, ...]  # last layer of the YAML

    @property
    def classes(self) -> dict[str, type[Any]]:
        """The classes by the names of `YOLO.task_map`."""
        return {
            "model": self.network,
            "trainer": self.trainer,
            "validator": self.validator,
            "predictor": self.predictor,
        }


DETECT, SEGMENT, POSE, OBB, CLASSIFY = yolo.detect, yolo.segment, yolo.pose, yolo.obb, yolo.classify
FAMILIES = (
    Family(
        "detect",
        tasks.DetectionModel,
        DETECT.DetectionTrainer,
        DETECT.DetectionValidator,
        DETECT.DetectionPredictor,
        ("Detect", "v10Detect"),
    ),
    Family(
        "segment",
        tasks.SegmentationModel,
        SEGMENT.SegmentationTrainer,
        SEGMENT.SegmentationValidator,
        SEGMENT.SegmentationPredictor,
        ("Segment", "Segment26"),
    ),
    Family("pose", tasks.PoseModel, POSE.PoseTrainer, POSE.PoseValidator, POSE.PosePredictor, ("Pose", "Pose26")),
    Family("obb", tasks.OBBModel, OBB.OBBTrainer, OBB.OBBValidator, OBB.OBBPredictor, ("OBB", "OBB26")),
    Family(
        "classify",
        tasks.ClassificationModel,
        CLASSIFY.ClassificationTrainer,
        CLASSIFY.ClassificationValidator,
        CLASSIFY.ClassificationPredictor,
        ("Classify",),
    ),
    Family(
        "detect",
        tasks.RTDETRDetectionModel,
        rtdetr.train.RTDETRTrainer,
        rtdetr.val.RTDETRValidator,
        rtdetr.predict.RTDETRPredictor,
        ("RTDETRDecoder",),
    ),
)


def family_of(network: nn.Module, where: str = "model") -> Family:
    """Return the family of a network.

    Raises:
        ValueError: it is not a network of Ultralytics, or has a head that is not known here.
    """
    for family in FAMILIES:
        if type(network) is family.network:
            return family
    if isinstance(network, tasks.BaseModel):
        layers: Any = network.model
        raise ValueError(f"{where}: expected a head that is known; got {type(layers[-1]).__name__}. {ADVICE}")
    raise ValueError(f"{where}: expected a YOLO object or its network; got {type(network).__name__}. {ADVICE}")


def family_of_head(head: str, where: str) -> Family:
    """Return the family whose networks end in a layer of this name.

    Raises:
        ValueError: the head is not known here.
    """
    for family in FAMILIES:
        if head in family.heads:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.heads)
    raise ValueError(f"{where}: expected one of the heads {known}; got {head}. {ADVICE}")
