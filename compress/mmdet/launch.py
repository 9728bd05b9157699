"""What the command line needs: the detector and its task, in each of the processes that torchrun may have started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from mmengine.dist import init_dist, is_distributed
from torch import distributed as dist
from torch import nn

from .config import ConfigLike, build, parsed, read
from .detection import Detection, task


def launched(
    config: ConfigLike, checkpoint: Path | None, options: Sequence[str], seed: int, quiet: bool = False
) -> tuple[nn.Module, Detection]:
    """
    Raises:
        ValueError: a config, checkpoint or dataset that cannot be used.
    """
    cfg = read(config, parsed(options))
    if quiet:
        cfg.log_level = "ERROR"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not is_distributed():
        if torch.cuda.is_available():
            init_dist("pytorch", **{"backend": "nccl", **(cfg.get("env_cfg") or {}).get("dist_cfg", {})})
        else:  # which mmengine's own does not think of
            dist.init_process_group("gloo")
    return build(cfg, checkpoint), task(cfg, seed=seed)
