"""A pruned detector by an entry of its config, for mmdet's own tools.

    _base_ = "cascade-mask-rcnn.py"                                     # the dense detector's config
    custom_imports = dict(imports=["compress.mmdet"])
    model = dict(type="PrunedDetector", dense="CascadeRCNN", directory="out")

`dense` is the type that the config had. `Runner.from_cfg`, `init_detector` and further training work as ever.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from mmdet.registry import MODELS
from mmengine.config import Config
from torch import nn

from ..api import load
from ..files import write_whole
from .config import settle_

NAME = "PrunedDetector"


@MODELS.register_module(name=NAME)  # type: ignore[untyped-decorator]
def pruned_detector(dense: str, directory: str, **detector: Any) -> nn.Module:
    """The dense detector, cut to what `directory` holds, with its weights."""
    model: nn.Module = load(MODELS.build({"type": dense, **detector}), directory)
    settle_(model)
    return model


def entry(cfg: Config, directory: str) -> Config:
    """The config of the pruned detector, from that of the dense one."""
    found = copy.deepcopy(cfg)
    imports = list(found.get("custom_imports", {}).get("imports", []))
    found.custom_imports = {"imports": [*imports, "compress.mmdet"], "allow_failed_imports": False}
    found.model = {**found.model, "type": NAME, "dense": found.model.type, "directory": directory}
    found.load_from = None
    return found


def write_config(cfg: Config, path: Path) -> None:
    """Write the config of the detector that is saved beside it; the folder can be moved."""
    write_whole(path, entry(cfg, "{{ fileDirname }}").pretty_text.encode())
