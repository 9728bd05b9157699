"""Training: tasks, the engine with its loop and checkpoints, gradients, fine-tuning and distillation.

Search algorithms and the pipeline run on the `Engine`; a `Task` says what to train and how to measure it.
"""

from .classification import Classification, logits_of
from .distillation_losses import distillation, match_kept_features
from .engine import HISTORY_POINTS, Engine, pick_device
from .execution import compiled_models, launch_problems, set_memory_format_, synchronized_batch_norms
from .fine_tuning import FineTuneJob, FineTuner, fine_tune
from .gradients import GradientComputer
from .lr_schedule import lr_factor, set_lr_
from .optimizers import make_optimizer
from .run_state import CheckpointMetadata, LoopPosition, ResumePoint
from .task import Task, TaskLike, as_task, load_task
from .trackers import tracker_problems, trackers_running

__all__ = [
    "HISTORY_POINTS",
    "CheckpointMetadata",
    "Classification",
    "Engine",
    "FineTuneJob",
    "FineTuner",
    "GradientComputer",
    "LoopPosition",
    "ResumePoint",
    "Task",
    "TaskLike",
    "as_task",
    "compiled_models",
    "distillation",
    "fine_tune",
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
