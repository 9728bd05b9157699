"""The task of a Hugging Face model, chosen by its class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

from compress.errors import NotReady
from compress.training import Classification, Task

from .model_loss import ModelLoss
from .object_detection import ObjectDetection
from .semantic_segmentation import SemanticSegmentation

MANY_LABELS = ("regression", "multi_label_classification")  # `config.problem_type` of heads that are no classifiers


def task_of_model(model: Any, train: Iterable[Any] | None = None, val: Iterable[Any] | None = None) -> Task:
    """Return the task that fits the class of a Hugging Face model; `compress.prune` does the same by itself.

    | class | task |
    | --- | --- |
    | ...ForImageClassification, ...ForVideoClassification, one label per image | `compress.Classification` |
    | ...ForSemanticSegmentation | `SemanticSegmentation`: the model's loss, mIoU |
    | ...ForObjectDetection | `ObjectDetection`: the model's loss, AP |
    | any other that returns a loss for a batch with labels | `ModelLoss`: the model's loss |

    Args:
        model: the model, or one of the same class.
        train: loader of training batches: dicts of the model's arguments, such as pixel_values and labels.
        val: loader of validation batches.

    Raises:
        NotReady: `model` is not a model of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise NotReady(f"model: expected a transformers.PreTrainedModel; got {type(model).__name__}")
    name = type(model).__name__
    if "ForImageClassification" in name or "ForVideoClassification" in name:
        config = model.config
        if config.problem_type not in MANY_LABELS and config.num_labels != 1:
            return Classification(train, val)
        return ModelLoss(model, train, val)
    if name.endswith("ForSemanticSegmentation"):
        return SemanticSegmentation(model, train, val)
    if name.endswith("ForObjectDetection"):
        return ObjectDetection(model, train, val)
    return ModelLoss(model, train, val)
