"""Training: tasks, the engine with its loop and checkpoints, gradients, fine-tuning and distillation.

Search algorithms and the pipeline run on the `Engine`; a `Task` says what to train and how to measure it.
"""

from .distillation_losses import distillation, match_kept_features
from .engine import HISTORY_POINTS, Engine, pick_device
from .execution import compiled_models, launch_problems, set_memory_format_, synchronized_batch_norms
from .fine_tuning import FineTuneJob, FineTuner, fine_tune
from .gradients import GradientComputer, GradientResult
from .lr_schedule import lr_factor, set_lr_
from .optimizers import make_optimizer
from .run_state import CheckpointMetadata, LoopPosition, ResumePoint
from .task import SampleLosses, Task, TaskLike, as_task, check_metrics, load_task
from .tasks import (
    Classification,
    Detection,
    Regression,
    Segmentation,
    Unlabelled,
    as_batches,
    average_precision_over_processes,
    can_measure_boxes,
    has_labels,
    logits_of,
)
from .trackers import tracker_problems, trackers_running

__all__ = [
    "HISTORY_POINTS",
    "CheckpointMetadata",
    "Classification",
    "Detection",
    "Engine",
    "FineTuneJob",
    "FineTuner",
    "GradientComputer",
    "GradientResult",
    "LoopPosition",
    "Regression",
    "ResumePoint",
    "SampleLosses",
    "Segmentation",
    "Task",
    "TaskLike",
    "Unlabelled",
    "as_batches",
    "as_task",
    "average_precision_over_processes",
    "can_measure_boxes",
    "check_metrics",
    "compiled_models",
    "distillation",
    "fine_tune",
    "has_labels",
    "launch_problems",
    "load_task",
    "logits_of",
    "lr_factor",
    "make_optimizer",
    "match_kept_features",
    "pick_device",
    "set_lr_",
    "set_memory_format_",
    "synchronized_batch_norms",
    "tracker_problems",
    "trackers_running",
]
