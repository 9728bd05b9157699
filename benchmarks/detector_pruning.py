"""Cascade Mask R-CNN on drawn shapes: 20, 40 and 60 % of the backbone's dimensions pruned, compared with table 4.6.

    python -m benchmarks.detector_pruning [--quick] [--folder FOLDER] [--steps 1200] [--only TEXT]

The thesis (F. Xue, Relaxation and Optimization for Automated Learning of Neural Network Architectures, 2022, section
4.3.4) prunes the Swin-T backbone of a detector trained on COCO. Here the detector is narrow and is trained from scratch
on images of rectangles, ellipses and triangles that the benchmark draws. Then every method prunes the same detector.
All methods read the same number of training batches: those that do not search fine-tune longer. Nothing is distilled,
as in the thesis. AP is measured on images that are not trained on. FOLDER holds images and weights; the training and
every trial are saved as they go, and a run that is stopped continues where it was.
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import compress
import compress.mmdet

from . import results
from .shapes import CLASSES, SIZE, SPLITS, write_shapes

CONFIG = "cascade-mask-rcnn_swin-t-p4-w7_fpn_3x_coco"
WIDTHS = [32, 64, 128, 256]
BACKBONE = {
    "embed_dims": WIDTHS[0],
    "depths": [1, 1, 2, 1],
    "num_heads": [1, 2, 4, 8],
    "window_size": 6,
    "drop_path_rate": 0.0,
    "convert_weights": False,
    "init_cfg": None,
}
NECK, BATCH, LR, WEIGHT_DECAY, WARMUP = 32, 8, 1e-3, 0.05, 100
SAVE_EVERY = 100  # training steps
SEARCH_BATCHES, FINETUNE_BATCHES = 40, 60
PERCENT_LEFT = (60, 40, 80)  # in the order in which they are run
ADAMW = {"optimizer": "adamw", "lr": 3e-4, "weight_decay": WEIGHT_DECAY}
SEARCHES: dict[str, dict[str, Any]] = {
    "rarts": {"method": "rarts", "epochs": f"{SEARCH_BATCHES // 2} steps", **ADAMW},  # two batches a step
    "netslim": {"method": "netslim", "epochs": f"{SEARCH_BATCHES} steps", **ADAMW},
    "magnitude": {"method": "magnitude"},
    "random": {"method": "random"},
}
APS = {"box": "coco/bbox_mAP", "mask": "coco/segm_mAP"}
THESIS = {100: ("50.6", "43.9"), 80: ("50.4", "43.7"), 60: ("49.2", "42.9")}  # percent left -> box and mask AP


def detector_config(folder: Path) -> Any:
    """Return the config with narrow layers, for the shapes in `folder`."""
    cfg = compress.mmdet.read(CONFIG, {"model.backbone": BACKBONE, "log_level": "ERROR", "param_scheduler": []})
    load, masks = {"type": "LoadImageFromFile"}, {"type": "LoadAnnotations", "with_bbox": True, "with_mask": True}
    keys = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
    resize = {"type": "Resize", "scale": (SIZE, SIZE), "keep_ratio": True}
    pipelines = {
        "train": [load, masks, {"type": "RandomFlip", "prob": 0.5}, {"type": "PackDetInputs"}],
        "val": [load, resize, masks, {"type": "PackDetInputs", "meta_keys": keys}],
    }
    for name, split in (("train", "train"), ("val", "val"), ("test", "val")):
        loader = cfg[f"{name}_dataloader"]
        loader.update({"batch_size": BATCH, "num_workers": 0, "persistent_workers": False})
        loader.dataset.update({"data_root": f"{folder}/", "ann_file": f"{split}.json", "pipeline": pipelines[split]})
        loader.dataset.update({"data_prefix": {"img": f"{split}/"}, "metainfo": {"classes": CLASSES}})
    for name in ("val_evaluator", "test_evaluator"):
        cfg[name].ann_file = str(folder / "val.json")
    _narrow_(cfg.model)
    cfg.optim_wrapper = {"type": "OptimWrapper", "optimizer": {"type": "AdamW", "lr": ADAMW["lr"]}}
    return cfg


def _narrow_(model: Any) -> None:
    """Narrow neck and heads, with few regions, for objects of a quarter to a half of the image."""
    model.neck.update({"in_channels": WIDTHS, "out_channels": NECK, "num_outs": 4})
    model.rpn_head.update({"in_channels": NECK, "feat_channels": NECK})
    model.rpn_head.anchor_generator.update({"strides": [4, 8, 16, 32], "scales": [4], "ratios": [0.5, 1.0, 2.0]})
    model.train_cfg.rpn.sampler.num = 64
    for settings in (model.train_cfg.rpn_proposal, model.test_cfg.rpn):
        settings.update({"nms_pre": 100, "max_per_img": 30})
    for stage in model.train_cfg.rcnn:
        stage.sampler.num = 32
    heads = model.roi_head
    heads.bbox_roi_extractor.out_channels = heads.mask_roi_extractor.out_channels = NECK
    small = {"in_channels": NECK, "conv_out_channels": NECK, "num_classes": len(CLASSES)}
    for head in heads.bbox_head:
        head.update({"num_shared_convs": 0, "fc_out_channels": 128, "reg_class_agnostic": True, **small})
    heads.mask_head.update({"num_convs": 2, **small})
    model.test_cfg.rcnn.update({"max_per_img": 10})


def train_detector(cfg: Any, task: Any, folder: Path, steps: int) -> tuple[Any, float]:
    """Return the detector after `steps` training steps, and the seconds of CPU; continue where a run was stopped."""
    torch.manual_seed(0)
    detector: Any = compress.mmdet.build(cfg)
    optimizer = torch.optim.AdamW(detector.parameters(), LR, weight_decay=WEIGHT_DECAY)
    path, done, seconds = folder / f"dense_{steps}.pt", 0, 0.0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        detector.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done, seconds = saved["done"], saved["seconds"]
    detector.train()
    while done < steps:
        torch.manual_seed(done)
        start, losses = time.process_time(), []
        for batch in task.train:
            if len(batch["inputs"]) < BATCH:
                continue
            for group in optimizer.param_groups:
                group["lr"] = LR * learning_rate_factor(done, steps)
            optimizer.zero_grad()
            loss = task.loss(task.forward(detector, batch), batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(detector.parameters(), 5.0)
            optimizer.step()
            losses.append(loss.detach())
            done += 1
            if done % SAVE_EVERY == 0 or done == steps:
                break
        seconds += time.process_time() - start
        state = {"model": detector.state_dict(), "optimizer": optimizer.state_dict(), "done": done, "seconds": seconds}
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
        print(f"{done} of {steps} steps, loss {torch.stack(losses).mean():.3f}, {seconds:.0f} s of CPU", flush=True)
    detector.eval()
    return detector, seconds


def learning_rate_factor(done: int, steps: int) -> float:
    """Return the warm-up, then the first half of a cosine: fine-tuning goes on from a rate that is not small."""
    return min((done + 1) / WARMUP, (1 + math.cos(math.pi * done / (2 * steps))) / 2)


def recipe(method: str, percent_left: int, seed: int, quick: bool) -> dict[str, Any]:
    """Return the recipe of a trial; methods that do not search fine-tune on the batches of the search, too."""
    search, searches = dict(SEARCHES[method]), "epochs" in SEARCHES[method]
    finetune = FINETUNE_BATCHES + (0 if searches else SEARCH_BATCHES)
    if quick:
        search, finetune = search | ({"epochs": "2 steps"} if searches else {}), 2
    return {
        "target": {"channels": False, "attention": True, "mlp": "before_activation", "round_to": 1},
        "budget": {"dims": f"{percent_left}%"},
        "search": search,
        "finetune": {"epochs": f"{finetune} steps", **ADAMW, "schedule": "cosine", "distill": None, "best": False},
        "timing": {"repeats": 3},
        "seed": seed,
    }


def run_trial(detector: Any, task: Any, method: str, percent_left: int, quick: bool) -> dict[str, Any]:
    """Prune the detector; return the AP of boxes and masks right after the cut and after fine-tuning."""
    start = time.process_time()
    report = compress.prune(detector, recipe(method, percent_left, 0, quick), task=task, quiet=True).report
    return {
        "method": method,
        "left": percent_left,
        "seed": 0,
        "dense": {name: report.dense.metrics[key] for name, key in APS.items()},
        "sliced": {name: report.sliced[key] for name, key in APS.items()},
        "tuned": {name: report.pruned.metrics[key] for name, key in APS.items()},
        "params": report.pruned.params / report.dense.params,
        "macs": report.pruned.macs / report.dense.macs,
        "cpu_seconds": time.process_time() - start,
    }


def main() -> None:
    parser = results.make_parser(__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "shapes", help="images and weights"
    )
    parser.add_argument("--steps", type=int, default=1200, help="training steps of the dense detector")
    parser.add_argument("--only", default="", help="run only methods whose name contains this text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = results.result_name("detector_pruning", options.quick)
    content = {} if options.quick else results.load(file)
    splits = SPLITS
    if options.quick:
        options.steps, options.folder, splits = 4, options.folder / "quick", {"train": (16, 0), "val": (4, 1)}
    write_shapes(options.folder, splits)
    cfg = detector_config(options.folder.resolve())
    task: Any = compress.mmdet.task(cfg)
    detector, seconds = train_detector(cfg, task, options.folder, options.steps)
    rows = content.get("rows", [])
    settings = {"steps": options.steps, "search_batches": SEARCH_BATCHES, "finetune_batches": FINETUNE_BATCHES}
    settings |= {"dense_cpu_seconds": seconds, "images": {split: count for split, (count, _) in splits.items()}}
    known = {(row["method"], row["left"]) for row in rows}
    for percent_left in PERCENT_LEFT[:1] if options.quick else PERCENT_LEFT:
        for method in [name for name in SEARCHES if options.only in name and (name, percent_left) not in known]:
            rows.append(run_trial(detector, task, method, percent_left, options.quick))
            print(rows[-1], flush=True)
            results.save(file, settings | {"rows": rows})
    results.publish(file, tables(settings | {"rows": rows}))


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the table of all methods and ratios, with the APs of the thesis."""
    rows = content["rows"]
    dense = [f"{100 * value:.1f}" for value in rows[0]["dense"].values()]
    lines = [["0 %", "dense", "-", *dense, "-", "-", *THESIS[100]]]
    for percent_left in sorted(PERCENT_LEFT, reverse=True):
        for method in SEARCHES:
            for row in (row for row in rows if (row["method"], row["left"]) == (method, percent_left)):
                aps = [f"{100 * row[when][what]:.1f}" for when in ("tuned", "sliced") for what in APS]
                thesis = THESIS.get(percent_left, ("-", "-")) if method == "rarts" else ("-", "-")
                lines.append([f"{100 - percent_left} %", method, f"{row['params']:.0%}", *aps, *thesis])
    head = ("pruned", "method", "parameters left", "box AP, fine-tuned", "mask AP, fine-tuned")
    head = (*head, "box AP after the cut", "mask AP after the cut", "thesis: box AP", "thesis: mask AP")
    minutes = content["dense_cpu_seconds"] / 60
    title = f"Dense detector: {content['steps']} steps of {BATCH} images, {minutes:.0f} minutes of CPU"
    return [results.ResultTable(head, lines, title)]


if __name__ == "__main__":
    main()
