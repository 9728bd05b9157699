"""Small detectors, and pictures in COCO's format for them: squares and discs, each kind in its own color, on noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config
from PIL import Image

import compress.mmdet  # noqa: F401  (mmcv's ops)

SIDE = 64


def make_pictures(folder: Path, count: int = 12, seed: int = 0) -> Path:
    """Pictures and `boxes.json`: class 0 is a square, class 1 a disc; masks are polygons."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    boxes: list[dict[str, Any]] = []
    for number in range(count):
        picture = random.integers(0, 90, (SIDE, SIDE, 3), dtype=np.uint8)
        for _ in range(2):
            kind, size = int(random.integers(2)), int(random.integers(18, 34))
            x, y = (int(v) for v in random.integers(0, SIDE - size, 2))
            grid = np.mgrid[0:size, 0:size] - (size - 1) / 2
            inside = np.ones((size, size), bool) if kind == 0 else np.hypot(*grid) <= size / 2
            picture[y : y + size, x : x + size][inside] = ((230, 60, 40), (40, 90, 230))[kind]
            angle = np.linspace(0, 2 * np.pi, 12, endpoint=False)
            corners = (
                np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
                if kind == 0
                else 0.5 + 0.5 * np.c_[np.cos(angle), np.sin(angle)]
            )
            outline = (np.array([x, y]) + size * corners).ravel().tolist()
            box = {"id": len(boxes) + 1, "image_id": number, "category_id": kind, "bbox": [x, y, size, size]}
            boxes.append(box | {"area": size * size, "iscrowd": 0, "segmentation": [outline]})
        Image.fromarray(picture).save(folder / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "height": SIDE, "width": SIDE})
    kinds = [{"id": 0, "name": "square"}, {"id": 1, "name": "disc"}]
    (folder / "boxes.json").write_text(json.dumps({"images": images, "annotations": boxes, "categories": kinds}))
    return folder


def _head(spread: float) -> dict[str, Any]:
    return {
        "type": "ConvFCBBoxHead",
        "num_shared_convs": 1,
        "num_shared_fcs": 1,
        "in_channels": 32,
        "conv_out_channels": 32,
        "fc_out_channels": 64,
        "roi_feat_size": 7,
        "num_classes": 2,
        "bbox_coder": {
            "type": "DeltaXYWHBBoxCoder",
            "target_means": [0.0] * 4,
            "target_stds": [spread] * 2 + [2 * spread] * 2,
        },
        "reg_class_agnostic": False,
        "reg_decoded_bbox": True,
        "norm_cfg": {"type": "BN", "requires_grad": True},
        "loss_cls": {"type": "CrossEntropyLoss", "use_sigmoid": False, "loss_weight": 1.0},
        "loss_bbox": {"type": "GIoULoss", "loss_weight": 5.0},
    }


def _swin() -> dict[str, Any]:
    return {
        "_delete_": True,
        "type": "SwinTransformer",
        "embed_dims": 24,
        "depths": [1, 1, 1, 1],
        "num_heads": [2, 2, 4, 4],
        "window_size": 7,
        "drop_path_rate": 0.0,
        "out_indices": (0, 1, 2, 3),
    }


def data_of(folder: Path, masks: bool) -> dict[str, Any]:
    notes = {"type": "LoadAnnotations", "with_bbox": True, "with_mask": masks}
    keys = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
    steps: list[dict[str, Any]] = [{"type": "LoadImageFromFile"}, {"type": "Resize", "scale": (SIDE, SIDE)}]
    pictures = {
        "type": "CocoDataset",
        "data_root": f"{folder}/",
        "ann_file": "boxes.json",
        "data_prefix": {"img": ""},
        "metainfo": {"classes": ("square", "disc")},
    }
    common = {"num_workers": 0, "persistent_workers": False}
    train = {
        "filter_cfg": {"filter_empty_gt": True},
        "pipeline": [steps[0], notes, steps[1], {"type": "PackDetInputs"}],
    }
    val = {"test_mode": True, "pipeline": [*steps, notes, {"type": "PackDetInputs", "meta_keys": keys}]}
    val_loader = {
        **common,
        "batch_size": 4,
        "dataset": pictures | val,
        "sampler": {"type": "DefaultSampler", "shuffle": False},
    }
    metric = {"type": "CocoMetric", "ann_file": f"{folder}/boxes.json", "metric": ["bbox", "segm"][: 1 + masks]}
    return {
        "train_dataloader": {**common, "batch_size": 4, "dataset": {"_delete_": True, **pictures, **train}},
        "val_dataloader": val_loader | {"_delete_": True},
        "test_dataloader": val_loader | {"_delete_": True},
        "val_evaluator": metric | {"_delete_": True},
        "test_evaluator": metric | {"_delete_": True},
    }


def small_config(folder: Path, base: str = "cascade-mask-rcnn_r50_fpn", epochs: int = 12) -> Config:
    """A small Cascade Mask R-CNN with a Swin of one block a stage, on the pictures in `folder`."""
    cascade = base.startswith("cascade")
    text = f'_base_ = ["mmdet::_base_/models/{base}.py", "mmdet::_base_/datasets/coco_instance.py", '
    text += '"mmdet::_base_/schedules/schedule_1x.py", "mmdet::_base_/default_runtime.py"]\n'
    path = folder / "base.py"
    path.write_text(text)
    cfg = Config.fromfile(path)
    changes: dict[str, Any] = {
        "model": {
            "backbone": _swin(),
            "neck": {"in_channels": [24, 48, 96, 192], "out_channels": 32},
            "rpn_head": {
                "in_channels": 32,
                "feat_channels": 32,
                "anchor_generator": {"scales": [4]},
            },
            "roi_head": {
                "bbox_head": [_head(0.1), _head(0.05), _head(0.033)] if cascade else _head(0.1),
                "bbox_roi_extractor": {"out_channels": 32},
                "mask_roi_extractor": {"out_channels": 32},
                "mask_head": {"in_channels": 32, "num_classes": 2},
            },
            "test_cfg": {"rcnn": {"max_per_img": 10}},
        },
        **data_of(folder, masks=True),
        "train_cfg": {"max_epochs": epochs},
        "param_scheduler": [{"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 6}],
        "optim_wrapper": {"optimizer": {"_delete_": True, "type": "AdamW", "lr": 2e-3, "weight_decay": 0.05}},
        "default_hooks": {"visualization": {"type": "DetVisualizationHook"}, "checkpoint": {"max_keep_ckpts": 1}},
        "log_level": "WARNING",
    }
    cfg.merge_from_dict(changes)
    lighten_(cfg)
    return cfg


def lighten_(cfg: Config) -> None:
    """Take away what takes the time of a two-stage detector: proposals, and wide heads."""
    for rpn in (cfg.model.train_cfg.rpn_proposal, cfg.model.test_cfg.rpn):
        rpn.update({"nms_pre": 60, "max_per_img": 20})
    cfg.model.train_cfg.rpn.sampler.num = 64
    stages = cfg.model.train_cfg.rcnn
    for stage in stages if isinstance(stages, list) else [stages]:
        stage.sampler.num = 32
    heads = cfg.model.roi_head.bbox_head
    for head in heads if isinstance(heads, list) else [heads]:
        head.fc_out_channels = 64
        if "conv_out_channels" in head:
            head.conv_out_channels = 32
    if "mask_head" in cfg.model.roi_head:
        cfg.model.roi_head.mask_head.update({"num_convs": 1, "conv_out_channels": 16})
