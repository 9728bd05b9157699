"""Cascade Mask R-CNN with Swin-T: cost of the scores, time to find groups, and an end-to-end run on COCO images.

    python -m benchmarks.detectors [--quick] [cost] [coco128] [onnx] [onnx_full] [--data FOLDER]
                                   [--repeats 5] [--steps 120] [--images 48]

`cost` uses the full detector and one image. A training step samples 64 regions per stage instead of 512, which makes
the share of the backbone, which has the scores, larger than in practice. `coco128` trains a detector with one narrow
block per stage from scratch: enough to run the whole pipeline on real images, not to measure AP. `onnx` trains the same
detector, prunes it without further training, and compares the detections of the exported file with those of mmdet.
`onnx_full` exports the full detector, with random weights scaled so that it detects something, on one image.
"""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import compress
import compress.mmdet
from compress.mmdet import onnx_export as exporter
from compress.mmdet.predict import load_images, predict
from compress.recipe import Recipe, Target, Timing
from compress.search import Job, search_class

from . import results
from .search_cost import Step, peak_memory

# isort: split
from mmdet.apis import inference_detector, init_detector

CONFIG = "cascade-mask-rcnn_swin-t-p4-w7_fpn_3x_coco"
SIZE = (320, 480)
TRAINING = {"optimizer": "adamw", "lr": 1e-4, "weight_decay": 0.05}
NARROW = {"embed_dims": 48, "depths": [1, 1, 1, 1], "num_heads": [2, 4, 4, 8], "init_cfg": None, "drop_path_rate": 0.0}


class DetectionWithoutData(compress.mmdet.Detection):
    """Detection task of the config, without data loaders."""

    def _loader(self, name: str) -> Any:
        return None


def make_batch() -> dict[str, Any]:
    """Return one image with six boxes and masks in the format of mmdet's loader."""
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(6, 2, generator=generator) * 200
    boxes = torch.cat([corners, corners + 40 + 60 * torch.rand(6, 2, generator=generator)], 1)
    masks = torch.zeros(6, *SIZE, dtype=torch.uint8)
    for mask, (left, top, right, low) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:low, left:right] = 1
    metainfo = {"img_shape": SIZE, "ori_shape": SIZE, "scale_factor": (1.0, 1.0)}
    instances = InstanceData(bboxes=boxes, labels=torch.arange(6), masks=BitmapMasks(masks.numpy(), *SIZE))
    sample = DetDataSample(metainfo=metainfo, gt_instances=instances, ignored_instances=InstanceData(bboxes=boxes[:0]))
    return {
        "inputs": [torch.randint(0, 256, (3, *SIZE), generator=generator, dtype=torch.uint8)],
        "data_samples": [sample],
    }


def measure_cost(repeats: int) -> dict[str, Any]:
    """Measure the time to find groups and slice, and the time and memory of a search step relative to a plain one."""
    cfg = compress.mmdet.read(CONFIG, {"model.backbone.init_cfg": None})
    for stage in cfg.model.train_cfg.rcnn:
        stage.sampler.num = 64
    torch.manual_seed(0)
    detector, task, data = compress.mmdet.build(cfg), DetectionWithoutData(cfg), make_batch()
    detector.eval()
    inputs = task.inputs(data)
    start = time.perf_counter()
    with torch.no_grad():
        detector(**inputs)
    forward_seconds = time.perf_counter() - start
    target = Target(channels=False, attention=True, mlp=True, include=("backbone",))
    start = time.perf_counter()
    groups = compress.find_groups(detector, inputs, target)
    groups_seconds = time.perf_counter() - start
    plan = compress.Plan.build(detector, groups, {g.name: range(int(0.6 * g.width)) for g in groups})
    compact = copy.deepcopy(detector)
    start = time.perf_counter()
    plan.apply_(compact)
    slice_seconds = time.perf_counter() - start
    del compact

    def plain() -> Step:
        model = copy.deepcopy(detector)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.05)

        def step() -> int:
            optimizer.zero_grad()
            task.loss(task.forward(model, data), data).backward()
            optimizer.step()
            return 1

        return step

    def scored() -> Step:
        model = copy.deepcopy(detector)
        search = {"method": "netslim", "epochs": "1000 steps", "gamma": 1e-4, **TRAINING}
        config = Recipe.load({"budget": {"dims": "60%"}, "search": search}).search
        searcher = search_class("netslim")(config, Job(model, groups, task, 1000))
        model.train()

        def step() -> int:
            searcher.step(data)
            return 1

        return step

    memory = {"plain": peak_memory(plain), "netslim": peak_memory(scored)}
    steps, seconds = {"plain": plain(), "netslim": scored()}, {"plain": [], "netslim": []}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            torch.manual_seed(repeat)  # so that both sample the same regions
            start = time.perf_counter()
            step()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["netslim"], seconds["plain"], strict=True)]
    return {
        "image": SIZE,
        "forward_s": forward_seconds,
        "groups_s": groups_seconds,
        "slice_s": slice_seconds,
        "groups_and_slice_in_forwards": (groups_seconds + slice_seconds) / forward_seconds,
        "plain_step_s": median(seconds["plain"]),
        "step_time": median(ratios),
        "step_times": ratios,
        "step_memory": memory["netslim"] / memory["plain"],
        "peak_mb": {name: held / 2**20 for name, held in memory.items()},
    }


def small_config(folder: Path) -> Any:
    """Return the config with narrow layers, for coco128 images with a longer side of 256."""
    cfg = compress.mmdet.read(CONFIG, {"model.backbone": NARROW, "model.neck.in_channels": [48, 96, 192, 384]})
    annotations, resize = (
        {"type": "LoadAnnotations", "with_bbox": True, "with_mask": True},
        {"type": "Resize", "scale": (256, 256)},
    )
    load_image, keys = {"type": "LoadImageFromFile"}, ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
    flip = {"type": "RandomFlip", "prob": 0.5}
    train_pipeline = [load_image, annotations, {**resize, "keep_ratio": True}, flip, {"type": "PackDetInputs"}]
    test_pipeline = [
        load_image,
        {**resize, "keep_ratio": True},
        annotations,
        {"type": "PackDetInputs", "meta_keys": keys},
    ]
    file = "annotations/instances_train2017.json"
    for name, pipeline in (("train", train_pipeline), ("val", test_pipeline), ("test", test_pipeline)):
        loader = cfg[f"{name}_dataloader"]
        loader.update({"batch_size": 2, "num_workers": 0, "persistent_workers": False})
        loader.dataset.update({"data_root": f"{folder}/", "ann_file": file, "pipeline": pipeline})
        loader.dataset.data_prefix = {"img": "images/train2017/"}
    for name in ("val_evaluator", "test_evaluator"):
        cfg[name].ann_file = str(folder / file)
    for rpn in (cfg.model.train_cfg.rpn_proposal, cfg.model.test_cfg.rpn):
        rpn.update({"nms_pre": 200, "max_per_img": 50})
    for stage in cfg.model.train_cfg.rcnn:
        stage.sampler.num = 48
    heads, width = cfg.model.roi_head, {"in_channels": 64, "conv_out_channels": 64}
    for head in heads.bbox_head:
        head.update({"num_shared_convs": 1, "fc_out_channels": 256, **width})
    heads.mask_head.update({"num_convs": 1, **width})
    cfg.model.neck.out_channels = heads.bbox_roi_extractor.out_channels = heads.mask_roi_extractor.out_channels = 64
    cfg.model.rpn_head.update({"in_channels": 64, "feat_channels": 64})
    cfg.model.test_cfg.rcnn.update({"score_thr": 0.01, "max_per_img": 20})
    cfg.merge_from_dict({"log_level": "WARNING", "param_scheduler": [], "optim_wrapper": {"optimizer": {"lr": 5e-4}}})
    return cfg


def train_small_detector(cfg: Any, steps: int) -> tuple[Any, Any, list[float]]:
    """Train the small detector; return it, its task and the training losses."""
    torch.manual_seed(0)
    detector: Any = compress.mmdet.build(cfg)
    task: Any = compress.mmdet.task(cfg)
    optimizer = torch.optim.AdamW(detector.parameters(), 5e-4, weight_decay=0.05)
    detector.train()
    losses: list[float] = []
    while len(losses) < steps:
        for batch in task.train:
            optimizer.zero_grad()
            loss = task.loss(task.forward(detector, batch), batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if len(losses) == steps:
                break
    detector.eval()
    return detector, task, losses


def run_coco128(folder: Path, steps: int) -> dict[str, Any]:
    """Train the small detector, prune it with rarts, and compare the detections of the saved and the live network."""
    cfg = small_config(folder)
    start = time.perf_counter()
    detector, task, losses = train_small_detector(cfg, steps)
    seconds = time.perf_counter() - start
    recipe = {
        "target": {"channels": False, "attention": True, "mlp": True},
        "budget": {"dims": "60%"},
        "search": {"method": "rarts", "epochs": "24 steps", **TRAINING, "distill": {"temperature": 1, "weight": 1}},
        "finetune": {"epochs": "36 steps", "distill": {"temperature": 1, "weight": 1}},
        "timing": {"repeats": 5},
    }
    with tempfile.TemporaryDirectory() as temporary:
        pruned = compress.prune(detector, recipe, task=task, workdir=Path(temporary) / "out")
        reloaded = init_detector(str(Path(temporary) / "out" / "config.py"), device="cpu")
        pruned_model: Any = pruned.model
        pruned_model.cfg = cfg
        images = sorted((folder / "images" / "train2017").glob("*.jpg"))[:8]
        pairs = [[inference_detector(m, str(path)).pred_instances for m in (pruned_model, reloaded)] for path in images]
    report = pruned.report
    finetune_losses = [h["loss"] for h in report.history if h["stage"] == "finetune" and "loss" in h]
    return {
        "dense_losses": [losses[0], sum(losses[-10:]) / 10],
        "finetune_losses": [sum(finetune_losses[:6]) / 6, sum(finetune_losses[-6:]) / 6],
        "params": [report.dense.params, report.pruned.params],
        "macs": [report.dense.macs, report.pruned.macs],
        "latency_ms": [report.dense.latency_ms, report.pruned.latency_ms],
        "mAP_50": {
            "dense": report.dense.metrics.get("coco/bbox_mAP_50"),
            "sliced": report.sliced.get("coco/bbox_mAP_50"),
            "pruned": report.pruned.metrics.get("coco/bbox_mAP_50"),
        },
        "boxes_compared": sum(len(a.bboxes) for a, _ in pairs),
        "boxes_equal": all(torch.equal(a.bboxes, b.bboxes) and torch.equal(a.scores, b.scores) for a, b in pairs),
        "seconds": {"dense training": seconds, **report.seconds},
    }


def run_onnx_export(folder: Path, steps: int, count: int, quick: bool) -> dict[str, Any]:
    """Export the dense and the compact detector and the compact backbone features; compare them with mmdet.

    If `quick`, export only the features, because a barely trained detector detects nothing.
    """
    cfg = small_config(folder)
    dense, task, _ = train_small_detector(cfg, steps)
    target = {"channels": False, "attention": True, "mlp": True}
    recipe = {"target": target, "budget": {"dims": "60%"}, "search": {"method": "magnitude"}, "timing": {"repeats": 3}}
    compact = compress.prune(dense, recipe, task=task, quiet=True).model
    images = load_images(cfg, sorted((folder / "images" / "train2017").glob("*.jpg"))[:count])
    summary: dict[str, Any] = {"steps": steps}
    with tempfile.TemporaryDirectory() as temporary:
        cases = [("dense", dense, "detector"), ("compact", compact, "detector")]
        for name, model, part in [*([] if quick else cases), ("compact features", compact, "features")]:
            start = time.perf_counter()
            report = exporter.export(model, Path(temporary) / f"{name}.onnx", images, part=part)
            summary[name] = _export_summary(report) | {"seconds": time.perf_counter() - start}
    return summary


def spread_outputs_(layer: Any) -> None:
    """Scale the layer in its first forward pass so that its outputs differ; equal scores detect nothing."""

    @torch.no_grad()
    def scale(module: Any, _: Any, out: Any) -> Any:
        factor = 3 / out.std()
        module.weight.mul_(factor)
        handle.remove()
        return out * factor

    handle = layer.register_forward_hook(scale)


def run_full_onnx_export(folder: Path) -> dict[str, Any]:
    """Export the full detector with scaled random weights; compare the detections on one image with mmdet."""
    cfg = compress.mmdet.read(CONFIG, {"model.backbone.init_cfg": None})
    torch.manual_seed(0)
    detector: Any = compress.mmdet.build(cfg)
    images = load_images(cfg, sorted((folder / "images" / "train2017").glob("*.jpg"))[:1])
    for module in detector.modules():
        module.training = False
    for head in detector.roi_head.bbox_head:
        torch.nn.init.normal_(head.fc_reg.weight, std=0.02)
    for layer in (detector.rpn_head.rpn_cls, *(head.fc_cls for head in detector.roi_head.bbox_head)):
        spread_outputs_(layer)
    predict(detector, images[0][None])
    with tempfile.TemporaryDirectory() as temporary:
        start = time.perf_counter()
        report = exporter.export(detector, Path(temporary) / "full.onnx", images, timing=Timing(repeats=3))
        seconds = time.perf_counter() - start
    return _export_summary(report) | {"seconds": seconds, "image": list(images[0].shape)}


def _export_summary(report: Any) -> dict[str, Any]:
    summary = {"bytes": report.file.bytes, "nodes": report.file.nodes, "parameters": report.file.parameters}
    summary |= {"onnxruntime_ms": report.file.latency_ms, "torch_ms": report.file.torch_latency_ms}
    if report.detections is None:
        return summary | {"max_rel_diff": report.max_rel_diff}
    return summary | {"detections": vars(report.detections)}


def main() -> None:
    parser = results.make_parser(__doc__, data=True)
    parser.add_argument("what", nargs="*", help="cost, coco128, onnx, onnx_full; default: all")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of `cost`")
    parser.add_argument("--steps", type=int, default=120, help="training steps of the small detector")
    parser.add_argument("--images", type=int, default=48, help="images on which detections are compared")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.quick:
        options.what, options.steps, options.images = ["onnx"], 4, 2
    torch.set_num_threads(options.threads)
    folder = options.data / "coco128"
    runs = {
        "cost": lambda: measure_cost(options.repeats),
        "coco128": lambda: run_coco128(folder, options.steps),
        "onnx": lambda: run_onnx_export(folder, options.steps, options.images, options.quick),
        "onnx_full": lambda: run_full_onnx_export(folder),
    }
    file = results.result_name("detectors", options.quick)
    for name in options.what or runs:
        results.save(file, results.load(file) | {name: runs[name](), "seed": 0})
    results.publish(file, tables(results.load(file)))


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return one table per kind of measurement."""
    all_tables = []
    if run := content.get("cost"):
        low, high = min(run["step_times"]), max(run["step_times"])
        lines = [
            ["time of a netslim step relative to a plain step", f"{run['step_time']:.2f} ({low:.2f} to {high:.2f})"],
            ["memory of a netslim step relative to a plain step", f"{run['step_memory']:.2f}"],
            ["time to find groups and slice, in forward passes", f"{run['groups_and_slice_in_forwards']:.2f}"],
        ]
        all_tables.append(results.ResultTable(("Cascade Mask R-CNN with Swin-T, one image", "measured"), lines))
    if run := content.get("coco128"):
        lines = [[f"AP50, {name}", f"{value:.1%}"] for name, value in run["mAP_50"].items()]
        lines.append(["parameters left", f"{run['params'][1] / run['params'][0]:.1%}"])
        lines.append(["MACs left", f"{run['macs'][1] / run['macs'][0]:.1%}"])
        equality = "all bit-equal" if run["boxes_equal"] else "not equal"
        lines.append(
            [
                "boxes of the reloaded detector (`init_detector`) compared with ours",
                f"{run['boxes_compared']}, {equality}",
            ]
        )
        all_tables.append(results.ResultTable(("narrow detector on coco128, end to end", "measured"), lines))
    files = {k: v for k, v in content.get("onnx", {}).items() if isinstance(v, dict)}
    files |= {"full, dense": content["onnx_full"]} if "onnx_full" in content else {}
    lines = []
    for name, run in files.items():
        cells = [f"{run['bytes'] / 1e6:.0f} MB", str(run["nodes"]), f"{run['onnxruntime_ms']:.0f} ms"]
        if detections := run.get("detections"):
            cells += [str(detections["compared"]), f"{detections['pixels']:.0e} px", f"{detections['score']:.0e}"]
        lines.append([name, *cells, *[""] * (6 - len(cells))])
    head = ("file", "size", "nodes", "onnxruntime", "detections compared", "box difference", "score difference")
    return [*all_tables, results.ResultTable(head, lines)] if lines else all_tables


if __name__ == "__main__":
    main()
