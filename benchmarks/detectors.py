"""Cascade Mask R-CNN with Swin-T: what scores cost, how long groups take; a small one from end to end on COCO images.

    python -m benchmarks.detectors [--quick] [cost] [coco128] [onnx] [onnx_full] [--data FOLDER]
                                   [--repeats 5] [--steps 120] [--images 48]

`cost` takes the full detector and one image. A training step samples 64 regions a stage and not 512, which leaves the
backbone, where the scores stand, a larger part of the time than it has in practice. `coco128` trains a detector with
one narrow block a stage from nothing: enough to go through everything with real images, not to measure AP. `onnx`
trains the same one, cuts it without further training, and compares the detections of its file with those of mmdet;
`onnx_full` exports the full detector, with random weights that are spread so that it finds something, on one image.
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
from compress.exporters import detector as exporter
from compress.mmdet.predict import pictures, predict
from compress.recipe import Recipe, Target, Timing
from compress.search import Job, search_class

from . import results
from .search_cost import Step, peak

# isort: split
from mmdet.apis import inference_detector, init_detector

CONFIG = "cascade-mask-rcnn_swin-t-p4-w7_fpn_3x_coco"
SIZE = (320, 480)
TRAINING = {"optimizer": "adamw", "lr": 1e-4, "weight_decay": 0.05}
NARROW = {"embed_dims": 48, "depths": [1, 1, 1, 1], "num_heads": [2, 4, 4, 8], "init_cfg": None, "drop_path_rate": 0.0}


class Fed(compress.mmdet.Detection):
    """The task of the config, without its data."""

    def _loader(self, name: str) -> Any:
        return None


def batch() -> dict[str, Any]:
    """One image with a few boxes and masks, as mmdet's loader gives it."""
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    random = torch.Generator().manual_seed(0)
    corner = torch.rand(6, 2, generator=random) * 200
    boxes = torch.cat([corner, corner + 40 + 60 * torch.rand(6, 2, generator=random)], 1)
    masks = torch.zeros(6, *SIZE, dtype=torch.uint8)
    for mask, (left, top, right, low) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:low, left:right] = 1
    known = {"img_shape": SIZE, "ori_shape": SIZE, "scale_factor": (1.0, 1.0)}
    found = InstanceData(bboxes=boxes, labels=torch.arange(6), masks=BitmapMasks(masks.numpy(), *SIZE))
    sample = DetDataSample(metainfo=known, gt_instances=found, ignored_instances=InstanceData(bboxes=boxes[:0]))
    return {
        "inputs": [torch.randint(0, 256, (3, *SIZE), generator=random, dtype=torch.uint8)],
        "data_samples": [sample],
    }


def cost(repeats: int) -> dict[str, Any]:
    cfg = compress.mmdet.read(CONFIG, {"model.backbone.init_cfg": None})
    for stage in cfg.model.train_cfg.rcnn:
        stage.sampler.num = 64
    torch.manual_seed(0)
    detector, task, data = compress.mmdet.build(cfg), Fed(cfg), batch()
    detector.eval()
    inputs = task.inputs(data)
    start = time.perf_counter()
    with torch.no_grad():
        detector(**inputs)
    forward = time.perf_counter() - start
    target = Target(channels=False, attention=True, mlp=True, include=("backbone",))
    start = time.perf_counter()
    groups = compress.find_groups(detector, inputs, target)
    finding = time.perf_counter() - start
    plan = compress.Plan.build(detector, groups, {g.name: range(int(0.6 * g.width)) for g in groups})
    small = copy.deepcopy(detector)
    start = time.perf_counter()
    plan.apply_(small)
    slicing = time.perf_counter() - start
    del small

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
        found = search_class("netslim")(config, Job(model, groups, task, 1000))
        model.train()

        def step() -> int:
            found.step(data)
            return 1

        return step

    memory = {"plain": peak(plain), "netslim": peak(scored)}
    steps, seconds = {"plain": plain(), "netslim": scored()}, {"plain": [], "netslim": []}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            torch.manual_seed(repeat)  # the same regions are sampled
            start = time.perf_counter()
            step()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["netslim"], seconds["plain"], strict=True)]
    return {
        "image": SIZE,
        "forward_s": forward,
        "groups_s": finding,
        "slice_s": slicing,
        "groups_and_slice_in_forwards": (finding + slicing) / forward,
        "plain_step_s": median(seconds["plain"]),
        "step_time": median(ratios),
        "step_times": ratios,
        "step_memory": memory["netslim"] / memory["plain"],
        "peak_mb": {name: held / 2**20 for name, held in memory.items()},
    }


def small_config(folder: Path) -> Any:
    """The shipped config, narrow, on coco128 at a longer side of 256."""
    cfg = compress.mmdet.read(CONFIG, {"model.backbone": NARROW, "model.neck.in_channels": [48, 96, 192, 384]})
    notes, resize = (
        {"type": "LoadAnnotations", "with_bbox": True, "with_mask": True},
        {"type": "Resize", "scale": (256, 256)},
    )
    load, keys = {"type": "LoadImageFromFile"}, ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
    flip = {"type": "RandomFlip", "prob": 0.5}
    training = [load, notes, {**resize, "keep_ratio": True}, flip, {"type": "PackDetInputs"}]
    testing = [load, {**resize, "keep_ratio": True}, notes, {"type": "PackDetInputs", "meta_keys": keys}]
    file = "annotations/instances_train2017.json"
    for name, pipeline in (("train", training), ("val", testing), ("test", testing)):
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


def trained(cfg: Any, steps: int) -> tuple[Any, Any, list[float]]:
    """The small detector, its task, and the losses of its training."""
    torch.manual_seed(0)
    detector: Any = compress.mmdet.build(cfg)
    task: Any = compress.mmdet.task(cfg)
    optimizer = torch.optim.AdamW(detector.parameters(), 5e-4, weight_decay=0.05)
    detector.train()
    losses: list[float] = []
    while len(losses) < steps:
        for some in task.train:
            optimizer.zero_grad()
            loss = task.loss(task.forward(detector, some), some)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if len(losses) == steps:
                break
    detector.eval()
    return detector, task, losses


def coco128(folder: Path, steps: int) -> dict[str, Any]:
    cfg = small_config(folder)
    start = time.perf_counter()
    detector, task, losses = trained(cfg, steps)
    seconds = time.perf_counter() - start
    recipe = {
        "target": {"channels": False, "attention": True, "mlp": True},
        "budget": {"dims": "60%"},
        "search": {"method": "rarts", "epochs": "24 steps", **TRAINING, "distill": {"temperature": 1, "weight": 1}},
        "finetune": {"epochs": "36 steps", "distill": {"temperature": 1, "weight": 1}},
        "timing": {"repeats": 5},
    }
    with tempfile.TemporaryDirectory() as place:
        pruned = compress.prune(detector, recipe, task=task, workdir=Path(place) / "out")
        again = init_detector(str(Path(place) / "out" / "config.py"), device="cpu")
        mine: Any = pruned.model
        mine.cfg = cfg
        images = sorted((folder / "images" / "train2017").glob("*.jpg"))[:8]
        pairs = [[inference_detector(m, str(path)).pred_instances for m in (mine, again)] for path in images]
    report = pruned.report
    tuned = [h["loss"] for h in report.history if h["stage"] == "finetune" and "loss" in h]
    return {
        "dense_losses": [losses[0], sum(losses[-10:]) / 10],
        "finetune_losses": [sum(tuned[:6]) / 6, sum(tuned[-6:]) / 6],
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


def onnx(folder: Path, steps: int, count: int, quick: bool) -> dict[str, Any]:
    """Dense and cut, complete and features alone; only those to be quick, as what is hardly trained detects nothing."""
    cfg = small_config(folder)
    dense, task, _ = trained(cfg, steps)
    target = {"channels": False, "attention": True, "mlp": True}
    recipe = {"target": target, "budget": {"dims": "60%"}, "search": {"method": "magnitude"}, "timing": {"repeats": 3}}
    compact = compress.prune(dense, recipe, task=task, quiet=True).model
    images = pictures(cfg, sorted((folder / "images" / "train2017").glob("*.jpg"))[:count])
    found: dict[str, Any] = {"steps": steps}
    with tempfile.TemporaryDirectory() as place:
        cases = [("dense", dense, "detector"), ("compact", compact, "detector")]
        for name, model, part in [*([] if quick else cases), ("compact features", compact, "features")]:
            start = time.perf_counter()
            report = exporter.export(model, Path(place) / f"{name}.onnx", images, part=part)
            found[name] = _said(report) | {"seconds": time.perf_counter() - start}
    return found


def spread_(layer: Any) -> None:
    """Scale a layer, when it is first run, so that its outputs differ: nothing is found where all are alike."""

    @torch.no_grad()
    def scale(module: Any, _: Any, out: Any) -> Any:
        factor = 3 / out.std()
        module.weight.mul_(factor)
        handle.remove()
        return out * factor

    handle = layer.register_forward_hook(scale)


def onnx_full(folder: Path) -> dict[str, Any]:
    cfg = compress.mmdet.read(CONFIG, {"model.backbone.init_cfg": None})
    torch.manual_seed(0)
    detector: Any = compress.mmdet.build(cfg)
    images = pictures(cfg, sorted((folder / "images" / "train2017").glob("*.jpg"))[:1])
    for module in detector.modules():
        module.training = False
    for head in detector.roi_head.bbox_head:
        torch.nn.init.normal_(head.fc_reg.weight, std=0.02)
    for layer in (detector.rpn_head.rpn_cls, *(head.fc_cls for head in detector.roi_head.bbox_head)):
        spread_(layer)
    predict(detector, images[0][None])
    with tempfile.TemporaryDirectory() as place:
        start = time.perf_counter()
        report = exporter.export(detector, Path(place) / "full.onnx", images, timing=Timing(repeats=3))
        seconds = time.perf_counter() - start
    return _said(report) | {"seconds": seconds, "image": list(images[0].shape)}


def _said(report: Any) -> dict[str, Any]:
    found = {"bytes": report.file.bytes, "nodes": report.file.nodes, "parameters": report.file.parameters}
    found |= {"onnxruntime_ms": report.file.latency_ms, "torch_ms": report.file.torch_latency_ms}
    if report.detections is None:
        return found | {"max_rel_diff": report.max_rel_diff}
    return found | {"detections": vars(report.detections)}


def main() -> None:
    parser = results.options_of(__doc__, data=True)
    parser.add_argument("what", nargs="*", help="cost, coco128, onnx, onnx_full; all if none is named")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.quick:
        options.what, options.steps, options.images = ["onnx"], 4, 2
    torch.set_num_threads(options.threads)
    folder = options.data / "coco128"
    runs = {
        "cost": lambda: cost(options.repeats),
        "coco128": lambda: coco128(folder, options.steps),
        "onnx": lambda: onnx(folder, options.steps, options.images, options.quick),
        "onnx_full": lambda: onnx_full(folder),
    }
    file = results.named("detectors", options.quick)
    for name in options.what or runs:
        results.save(file, results.load(file) | {name: runs[name](), "seed": 0})
    results.show(file, sheets(results.load(file)))


def sheets(content: dict[str, Any]) -> list[results.Sheet]:
    found = []
    if run := content.get("cost"):
        low, high = min(run["step_times"]), max(run["step_times"])
        lines = [
            ["step of netslim, time of a plain one's", f"{run['step_time']:.2f} ({low:.2f} to {high:.2f})"],
            ["the same, memory", f"{run['step_memory']:.2f}"],
            ["finding groups and slicing, in forward passes", f"{run['groups_and_slice_in_forwards']:.2f}"],
        ]
        found.append(results.Sheet(("Cascade Mask R-CNN with Swin-T, one image", "measured"), lines))
    if run := content.get("coco128"):
        lines = [[f"AP50, {name}", f"{value:.1%}"] for name, value in run["mAP_50"].items()]
        lines.append(["parameters left", f"{run['params'][1] / run['params'][0]:.1%}"])
        lines.append(["MACs left", f"{run['macs'][1] / run['macs'][0]:.1%}"])
        same = "all the same bits" if run["boxes_equal"] else "not the same"
        lines.append(["boxes by `init_detector` against ours", f"{run['boxes_compared']}, {same}"])
        found.append(results.Sheet(("a narrow one on coco128, from end to end", "measured"), lines))
    files = {k: v for k, v in content.get("onnx", {}).items() if isinstance(v, dict)}
    files |= {"full, dense": content["onnx_full"]} if "onnx_full" in content else {}
    lines = []
    for name, run in files.items():
        cells = [f"{run['bytes'] / 1e6:.0f} MB", str(run["nodes"]), f"{run['onnxruntime_ms']:.0f} ms"]
        if seen := run.get("detections"):
            cells += [str(seen["compared"]), f"{seen['pixels']:.0e} px", f"{seen['score']:.0e}"]
        lines.append([name, *cells, *[""] * (6 - len(cells))])
    head = ("file", "size", "nodes", "onnxruntime", "detections compared", "boxes off by", "scores off by")
    return [*found, results.Sheet(head, lines)] if lines else found


if __name__ == "__main__":
    main()
