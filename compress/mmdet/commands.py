"""Functions behind the command line's `--mmdet`: build a detector and its task, preview it, export a saved one."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.dist import init_dist, is_distributed
from mmengine.structures import InstanceData
from torch import nn

from compress.distributed import init_process_group
from compress.exporters import ExportReport
from compress.recipe import Recipe, Timing
from compress.report import Report
from compress.storage import find_saved
from compress.surgery import Plan, load

from .config import ConfigLike, build_detector, parse_cfg_options, read_config
from .detection import NUM_COMPARED_IMAGES, Detection, detection_task
from .onnx_export import describe_detector, export
from .predict import load_images

IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


def build_for_command(
    config: ConfigLike, checkpoint: Path | None, options: Sequence[str], seed: int, quiet: bool = False
) -> tuple[nn.Module, Detection]:
    """Build the detector and the task of a config; join the process group if torchrun started several processes.

    Args:
        options: as given to `--cfg-options`.
        quiet: log errors only.

    Raises:
        ValueError: the config, checkpoint or dataset cannot be used.
    """
    with redirect_stdout(sys.stderr):  # mmengine's loggers keep the stream that was stdout when they were created
        cfg = read_config(config, parse_cfg_options(options))
        if quiet:
            cfg.log_level = "ERROR"
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not is_distributed():
            if torch.cuda.is_available():
                init_dist("pytorch", **{"backend": "nccl", **(cfg.get("env_cfg") or {}).get("dist_cfg", {})})
            else:  # mmengine's init_dist needs GPUs
                init_process_group(cpu=True)
        return build_detector(cfg, checkpoint), detection_task(cfg, seed=seed)


def build_for_preview(
    config: ConfigLike, checkpoint: Path | None, options: Sequence[str], size: Sequence[int], recipe: Recipe
) -> tuple[nn.Module, Recipe, dict[str, Any]]:
    """Build the detector of a config, and return the recipe with its parts, and example inputs of random pixels.

    The config's data and pretrained backbone are not read.

    Args:
        options: as given to `--cfg-options`.
        size: height and width of the image.

    Raises:
        ValueError: the config or checkpoint cannot be used.
    """
    with redirect_stdout(sys.stderr):
        cfg = read_config(config, parse_cfg_options(options))
        cfg.train_dataloader = cfg.val_dataloader = cfg.model.backbone.init_cfg = None
        detector, task = build_detector(cfg, checkpoint), detection_task(cfg)
    if not recipe.target.include:
        recipe = recipe.model_copy(update={"target": recipe.target.model_copy(update={"include": task.include})})
    shape = tuple(size)
    sample = DetDataSample(metainfo={"img_shape": shape, "ori_shape": shape, "scale_factor": (1.0, 1.0)})
    sample.gt_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
    pixels = torch.randint(256, (3, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return detector, recipe, task.inputs({"inputs": [pixels], "data_samples": [sample]})


def export_saved_detector(
    directory: Path,
    config: ConfigLike,
    options: Sequence[str],
    path: Path,
    part: str,
    images: Path | None,
    opset: int | None,
    slim: bool,
) -> ExportReport:
    """Export a saved detector to ONNX, compared on images and timed against the dense detector.

    Args:
        directory: where the pruned detector was saved.
        config: the config of the dense detector.
        options: as given to `--cfg-options`.
        images: an image or a folder of images; default: the config's validation images.

    Raises:
        ValueError: the config, directory or images cannot be used, the config is a file of the directory, or the export
            fails (ExportError).
        MissingExtra: the packages of the `onnx` extra are not installed.
        OSError: the file cannot be written.
    """
    if not isinstance(config, Config) and Path(config).resolve().is_relative_to(directory.resolve()):
        raise ValueError(
            f"--mmdet {config}: is in the saved directory, and a config is Python code, which is not run from there; "
            "give the config of the dense detector"
        )
    directory = find_saved(directory)
    cfg = read_config(config, parse_cfg_options(options))
    classes: Sequence[str] | None = None
    if images is not None:
        compared_images = load_images(cfg, _image_paths(images)[:NUM_COMPARED_IMAGES])
    else:
        task = detection_task(read_config(cfg, {"train_dataloader": None}))
        compared_images, classes = task.sample_images(NUM_COMPARED_IMAGES), task.class_names
    cfg.model.backbone.init_cfg = None  # pretrained weights are not needed: the dense detector is only timed
    dense = build_detector(cfg)
    compact = load(copy.deepcopy(dense), directory)
    recipe = Report.load(directory / "report.json").recipe if (directory / "report.json").exists() else {}
    return export(
        compact,
        path,
        compared_images,
        part=part,
        opset=opset,
        slim=slim,
        dense=dense,
        about=describe_detector(compact, classes, plan=Plan.load(directory / "plan.json"), recipe=recipe),
        timing=Timing.model_validate(recipe.get("timing") or {"repeats": 5}),
    )


def _image_paths(images: Path) -> list[Path]:
    """Return an image, or the images of a folder, in the order of their names.

    Raises:
        ValueError: there is no image.
    """
    if images.is_file():
        return [images]
    paths = sorted(path for path in images.glob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    if not paths:
        raise ValueError(f"--images {images}: expected an image or a folder of them; found none")
    return paths
