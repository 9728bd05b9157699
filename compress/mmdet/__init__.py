"""Prune MMDetection detectors: models and tasks from mmdet configs, fine-tuned and evaluated on mmengine's Runner.

This is the only package that imports mmdet. Importing it has two side effects that mmdet needs before it is used:
- `mmcv._ext` is set to an implementation on torchvision's kernels if mmcv has no compiled ops, because `import mmdet`
  fails without it;
- torch is told which types in checkpoints of mmengine's Runner are safe to load, because torch refuses them otherwise.
"""

from .install_ops import install_mmcv_ops

install_mmcv_ops()  # before the modules below, which import mmdet

from .compact_forms import WindowMSA  # noqa: E402
from .config import build_detector as build  # noqa: E402
from .config import read_config as read  # noqa: E402
from .detection import Detection  # noqa: E402
from .detection import detection_task as task  # noqa: E402
from .distill import channelwise_loss as channelwise  # noqa: E402
from .mmcv_ops import MissingOp  # noqa: E402
from .pruned_config import pruned_detector_config as entry  # noqa: E402
from .safe_checkpoints import allow_runner_checkpoints  # noqa: E402

allow_runner_checkpoints()

__all__ = ["Detection", "MissingOp", "WindowMSA", "build", "channelwise", "entry", "read", "task"]
