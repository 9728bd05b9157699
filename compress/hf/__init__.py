"""Hugging Face: tasks, the Trainer with a teacher, and models that load from their directory alone.

This is the only package that imports transformers, apart from the compact forms of its attention modules.
"""

from .config_file import PROCESSOR_FILES, write_config
from .model_loss import ModelLoss
from .model_task import task_of_model as task
from .object_detection import ObjectDetection
from .saved_model import load_model as load
from .semantic_segmentation import SemanticSegmentation
from .trainer import DistillationTrainer

__all__ = [
    "PROCESSOR_FILES",
    "DistillationTrainer",
    "ModelLoss",
    "ObjectDetection",
    "SemanticSegmentation",
    "load",
    "task",
    "write_config",
]
