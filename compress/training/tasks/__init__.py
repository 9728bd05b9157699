"""Tasks: classification, segmentation, detection with torchvision's detectors, regression, imitation of a teacher."""

from .average_precision import average_precision_over_processes
from .average_precision import can_measure as can_measure_boxes
from .classification import Classification, logits_of
from .detection import Detection
from .regression import Regression
from .segmentation import Segmentation
from .unlabelled import Unlabelled, as_batches, has_labels

__all__ = [
    "Classification",
    "Detection",
    "Regression",
    "Segmentation",
    "Unlabelled",
    "as_batches",
    "average_precision_over_processes",
    "can_measure_boxes",
    "has_labels",
    "logits_of",
]
