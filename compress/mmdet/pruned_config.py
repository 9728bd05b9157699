"""The config of a pruned detector, with which mmdet's own tools build and load it.

    _base_ = "cascade-mask-rcnn.py"                                     # the dense detector's config
    custom_imports = dict(imports=["compress.mmdet"])
    model = dict(type="PrunedDetector", dense="CascadeRCNN", directory="out")

`dense` is the detector type of the dense config. `Runner.from_cfg`, `init_detector` and further training work as usual.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from mmdet.registry import MODELS
from mmengine.config import Config
from torch import nn

from compress.storage import write_atomic
from compress.surgery import load

from .config import mark_initialized_

TYPE_NAME = "PrunedDetector"


@MODELS.register_module(name=TYPE_NAME)  # type: ignore[untyped-decorator]
def pruned_detector(dense: str, directory: str, **detector: Any) -> nn.Module:
    """Build the dense detector, prune it by the plan in `directory`, and load its weights."""
    model: nn.Module = load(MODELS.build({"type": dense, **detector}), directory)
    mark_initialized_(model)
    return model


def pruned_detector_config(cfg: Config, directory: str) -> Config:
    """Return the config of the pruned detector, derived from that of the dense one.

    Args:
        directory: where the pruned detector was saved.
    """
    pruned = copy.deepcopy(cfg)
    imports = list(pruned.get("custom_imports", {}).get("imports", []))
    pruned.custom_imports = {"imports": [*imports, "compress.mmdet"], "allow_failed_imports": False}
    pruned.model = {**pruned.model, "type": TYPE_NAME, "dense": pruned.model.type, "directory": directory}
    pruned.load_from = None
    return pruned


def write_config(cfg: Config, path: Path) -> None:
    """Write the config of a pruned detector that is saved in the same folder; the folder can be moved."""
    write_atomic(path, pruned_detector_config(cfg, "{{ fileDirname }}").pretty_text.encode())
