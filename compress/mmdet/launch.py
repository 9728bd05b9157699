"""What the command line needs: the detector and its task, in each process that torchrun started; its file."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import init_dist, is_distributed
from torch import nn

from ..api import load
from ..exporters.report import ExportReport
from ..plan import Plan
from ..processes import join
from ..recipe import Timing
from ..report import Report
from .config import ConfigLike, build, parsed, read
from .detection import COMPARED, Detection, task

PICTURES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


def launched(
    config: ConfigLike, checkpoint: Path | None, options: Sequence[str], seed: int, quiet: bool = False
) -> tuple[nn.Module, Detection]:
    """
    Raises:
        ValueError: a config, checkpoint or dataset that cannot be used.
    """
    with redirect_stdout(sys.stderr):  # loggers of mmengine stay where they begin
        return _launched(config, checkpoint, options, seed, quiet)


def _launched(
    config: ConfigLike, checkpoint: Path | None, options: Sequence[str], seed: int, quiet: bool
) -> tuple[nn.Module, Detection]:
    cfg = read(config, parsed(options))
    if quiet:
        cfg.log_level = "ERROR"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not is_distributed():
        if torch.cuda.is_available():
            init_dist("pytorch", **{"backend": "nccl", **(cfg.get("env_cfg") or {}).get("dist_cfg", {})})
        else:  # which mmengine's own does not think of
            join(cpu=True)
    return build(cfg, checkpoint), task(cfg, seed=seed)


def exported(
    directory: Path,
    config: ConfigLike,
    options: Sequence[str],
    path: Path,
    part: str,
    images: Path | None,
    opset: int | None,
    slim: bool,
) -> ExportReport:
    """A saved detector as an ONNX file, compared on images and with the dense one.

    Raises:
        ValueError: a config, directory or images that cannot be used, or whatever an export raises.
    """
    from ..exporters import detector as exporter
    from .predict import pictures

    cfg = read(config, parsed(options))
    if images is not None:
        paths = [images] if images.is_file() else sorted(p for p in images.glob("*") if p.suffix.lower() in PICTURES)
        if not paths:
            raise ValueError(f"--images {images}: expected an image or a folder of them; found none")
        seen, classes = pictures(cfg, paths[:COMPARED]), None
    else:
        known_by = task(read(cfg, {"train_dataloader": None}))
        seen, classes = known_by.pictures(COMPARED), known_by.classes
    cfg.model.backbone.init_cfg = None  # of a dense one, whose weights only its times need
    dense = build(cfg)
    compact = load(copy.deepcopy(dense), directory)
    known = Report.load(directory / "report.json").recipe if (directory / "report.json").exists() else {}
    about = exporter.described(compact, plan=Plan.load(directory / "plan.json"), recipe=known)
    about.classes = about.classes or classes
    timing = Timing.model_validate(known.get("timing") or {"repeats": 5})
    given: dict[str, Any] = {"opset": opset, "slim": slim, "dense": dense, "about": about, "timing": timing}
    return exporter.export(compact, path, seen, part=part, **given)
