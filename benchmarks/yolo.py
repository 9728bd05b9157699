"""YOLO on coco128: mAP right after the cut and after equal fine-tuning, and latency, against Torch-Pruning's way.

    python -m benchmarks.yolo [--quick] [--data FOLDER] [--networks yolov8n yolo11n] [--budgets 60 40]
                              [--epochs 100] [--steps 64] [--dense FOLDER]

A network from its YAML is trained on the 128 images of coco128 at 192 pixels and evaluated on the same images, as
Ultralytics' coco128.yaml does: enough to compare what a cut leaves, not a detector. `compress` uses the packaged recipe
`yolo_half` with another budget. Torch-Pruning follows its script for YOLOv8: C2f blocks are split into two
convolutions, the head is not cut, and every other layer loses the same fraction of its channels by group norm, here in
one step and by the fraction that meets the budget. Both are fine-tuned for the same steps by Ultralytics' trainer, with
the dense network as teacher.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch_pruning as tp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import compress
import compress.yolo
from compress.budget import compare_latency, latency_ratio
from compress.exporters import OnnxRunner
from compress.progress import ProgressDisplay
from compress.recipe import Recipe
from compress.training import Engine, FineTuneJob

from . import results
from .zoo import count_macs

# isort: split
from ultralytics.nn.modules import C2f, Conv, Detect
from ultralytics.nn.modules.block import Attention

SIZE, BATCH, SEED = 192, 16, 0
RECIPE = "yolo_half"
# The images are learned by heart: weak augmentation, and an optimizer step for each batch.
SETTINGS: dict[str, Any] = {"imgsz": SIZE, "batch": BATCH, "nbs": BATCH, "mosaic": 0.0, "scale": 0.1}
SETTINGS |= {"translate": 0.05, "hsv_h": 0.0, "hsv_s": 0.2, "hsv_v": 0.2, "erasing": 0.0, "close_mosaic": 0}
DENSE_TRAINING = {"optimizer": "AdamW", "lr0": 2e-3, "warmup_epochs": 2}
METRICS = ("mAP50-95(B)", "mAP50(B)")


class SplitC2f(nn.Module):
    """A C2f block whose first convolution is two, as Torch-Pruning needs it."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.first, self.second = (self._half(block.cv1, part) for part in (0, 1))
        self.cv2, self.m = block.cv2, block.m
        self.i, self.f, self.type, self.np = block.i, block.f, block.type, block.np

    @staticmethod
    def _half(conv: Any, part: int) -> Any:
        """Return a convolution with one half of the output channels."""
        half = Conv(conv.conv.in_channels, conv.conv.out_channels // 2, 1, 1)
        rows = slice(part * (conv.conv.out_channels // 2), (part + 1) * (conv.conv.out_channels // 2))
        state = {name: value[rows] if value.ndim else value for name, value in conv.state_dict().items()}
        half.load_state_dict(state)
        half.bn.eps, half.bn.momentum = conv.bn.eps, conv.bn.momentum
        return half

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.first(x), self.second(x)]
        for module in self.m:
            parts.append(module(parts[-1]))
        out: Tensor = self.cv2(torch.cat(parts, 1))
        return out


def write_data(source: Path, folder: Path, count: int | None) -> Path:
    """Write a data YAML and labels for the COCO images in `source`; return the YAML."""
    coco = json.loads((source / "annotations" / "instances_train2017.json").read_text(encoding="utf-8"))
    categories = sorted(coco["categories"], key=lambda category: category["id"])
    number_of = {category["id"]: number for number, category in enumerate(categories)}
    images, labels = folder / "images", folder / "labels"
    images.mkdir(parents=True)
    labels.mkdir()
    lines: dict[int, list[str]] = {}
    sizes = {image["id"]: (image["width"], image["height"]) for image in coco["images"]}
    for box in coco["annotations"]:
        (x, y, w, h), (width, height) = box["bbox"], sizes[box["image_id"]]
        values = ((x + w / 2) / width, (y + h / 2) / height, w / width, h / height)
        text = " ".join(f"{value:.6f}" for value in values)
        lines.setdefault(box["image_id"], []).append(f"{number_of[box['category_id']]} {text}")
    for image in coco["images"][:count]:
        name = Path(image["file_name"])
        (images / name).symlink_to((source / "images" / "train2017" / name).resolve())
        (labels / name).with_suffix(".txt").write_text("\n".join(lines.get(image["id"], [])) + "\n")
    names = "".join(f"  {number}: {category['name']}\n" for number, category in enumerate(categories))
    (folder / "coco128.yaml").write_text(f"path: {folder}\ntrain: images\nval: images\nnames:\n{names}")
    return folder / "coco128.yaml"


def train_dense(name: str, data: Path, epochs: int, weights: Path) -> Any:
    """Return the YOLO with the weights in a file; train it and write the file if there is none."""
    torch.manual_seed(SEED)
    model = compress.yolo.build(f"{name}.yaml")
    if not weights.exists():
        with tempfile.TemporaryDirectory() as folder:
            settings = {**SETTINGS, **DENSE_TRAINING, "data": str(data), "project": folder, "seed": SEED}
            model.train(epochs=epochs, val=False, plots=False, amp=False, device="cpu", workers=0, **settings)
        weights.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in model.model.state_dict().items()}, weights)
        model = compress.yolo.build(f"{name}.yaml")
    model.model.load_state_dict(load_file(weights))
    model.model.eval()
    return model


def prune_with_torch_pruning(network: nn.Module, fraction: float) -> nn.Module:
    """Return a copy that Torch-Pruning has cut; every layer loses the smallest fraction that meets the MACs budget."""
    split = copy.deepcopy(network)
    layers: Any = split.model
    for number, layer in enumerate(layers):
        if isinstance(layer, C2f):
            layers[number] = SplitC2f(layer)
    for parameter in split.parameters():
        parameter.requires_grad_(True)
    example = torch.randn(1, 3, SIZE, SIZE)
    most, low, high, best = fraction * count_macs(split, example), 0.0, 0.95, split
    for _ in range(7):
        ratio = (low + high) / 2
        cut = copy.deepcopy(split)
        ignored = [module for module in cut.modules() if isinstance(module, (Detect, Attention))]
        importance = tp.importance.GroupMagnitudeImportance()
        pruner = tp.pruner.GroupNormPruner(
            cut, example, importance=importance, iterative_steps=1, pruning_ratio=ratio, ignored_layers=ignored
        )
        pruner.step()
        if count_macs(cut, example) > most:
            low = ratio
        else:
            high, best = ratio, cut
    return best


def export_runner(network: nn.Module, folder: Path, name: str) -> OnnxRunner:
    """Return the ONNX file of a network, written by Ultralytics' exporter, in onnxruntime."""
    copied: Any = copy.deepcopy(network)
    copied.pt_path = str(folder / f"{name}.pt")  # it writes beside it
    file = compress.yolo.PrunedYOLO(copied, image_size=SIZE).export(format="onnx", device="cpu")
    return OnnxRunner(file)


def run(name: str, model: Any, data: Path, percents: list[int], steps: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Prune one network to each budget in both ways; yield the rows."""
    task = compress.yolo.task(model, data=data, seed=SEED, val=False, **SETTINGS)
    image = torch.rand(1, 3, SIZE, SIZE)
    dense_macs = count_macs(model.model, image)
    dense = task.evaluate(model.model, ())
    for percent in percents:
        for method in ("compress", "torch-pruning"):
            start = time.perf_counter()
            row: dict[str, Any] = {"network": name, "budget": percent, "method": method, "seed": SEED}
            engine = Engine(torch.device("cpu"), SEED, ProgressDisplay(quiet=True))
            recipe = {"extends": RECIPE, "budget": f"{percent}%", "seed": SEED, "timing": {"repeats": 3}}
            config = Recipe.load({**recipe, "finetune": {"epochs": f"{steps} steps"}}).finetune
            try:
                if method == "compress":
                    pruned = compress.prune(model.model, {**recipe, "finetune": None}, task=task, quiet=True)
                    network, plan = pruned.model, pruned.plan
                else:
                    network, plan = prune_with_torch_pruning(model.model, percent / 100), compress.Plan({}, {})
                row |= {"cut_seconds": round(time.perf_counter() - start), "dense": {m: dense[m] for m in METRICS}}
                row["macs_left"] = count_macs(network, image) / dense_macs
                counts = [sum(p.numel() for p in net.parameters()) for net in (network, model.model)]
                row["params_left"] = counts[0] / counts[1]
                row["after_cut"] = _metrics(task, network)
                with tempfile.TemporaryDirectory() as folder:
                    runners = [
                        export_runner(net, Path(folder), part)
                        for net, part in ((model.model, "dense"), (network, "cut"))
                    ]
                    times = compare_latency(runners, image, repeats)
                row["latency_ms"] = [t.median for t in times]
                row["latency_left"] = latency_ratio(times[0], times[1]).value
                assert config is not None
                task.finetune(FineTuneJob(network, model.model, plan, config, engine, steps))
                row["tuned"] = _metrics(task, network)
            except Exception as error:  # of the rival, or of its pruned network
                if method == "compress":
                    raise
                row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            yield {**row, "seconds": round(time.perf_counter() - start)}


def _metrics(task: Any, network: nn.Module) -> dict[str, float]:
    values = task.evaluate(network.eval(), ())
    return {metric: values[metric] for metric in METRICS}


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the table of all networks and budgets."""

    def both(row: dict[str, Any], key: str) -> str:
        return " / ".join(f"{100 * row[key][metric]:.1f}" for metric in METRICS) if key in row else "-"

    lines = [
        [
            row["network"],
            row["method"],
            f"{row['macs_left']:.1%}" if "macs_left" in row else row.get("error", "-"),
            f"{row['params_left']:.1%}" if "params_left" in row else "-",
            *(both(row, key) for key in ("dense", "after_cut", "tuned")),
            f"{row['latency_left']:.2f}" if "latency_left" in row else "-",
        ]
        for row in content["rows"]
    ]
    head = ("network", "method", "MACs left", "parameters left", "dense, mAP50-95 / mAP50", "right after the cut")
    return [results.ResultTable((*head, "fine-tuned", "onnxruntime, time left"), lines)]


def main() -> None:
    parser = results.make_parser(__doc__, data=True)
    parser.add_argument("--networks", nargs="+", default=["yolov8n", "yolo11n"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[60, 40], help="percent of the MACs that are left")
    parser.add_argument("--epochs", type=int, default=100, help="of the dense training")
    parser.add_argument("--steps", type=int, default=64, help="of the fine-tuning")
    parser.add_argument("--dense", type=Path, help="folder of dense weights, written if they are not there")
    parser.add_argument("--repeats", type=int, default=50, help="timed runs")
    options = parser.parse_args()
    if options.quick:
        options.networks, options.budgets, options.epochs = ["yolov8n"], [60], 1
        options.steps, options.repeats = 2, 5
    torch.set_num_threads(1)
    file = results.result_name("yolo", options.quick)
    rows = [row for row in results.load(file).get("rows", []) if row["network"] not in options.networks]
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(options.data / "coco128", Path(folder) / "coco128", 16 if options.quick else None)
        dense = Path(folder) if options.dense is None else options.dense
        for name in options.networks:
            model = train_dense(name, data, options.epochs, dense / f"{name}.safetensors")
            settings = {"size": SIZE, "epochs": options.epochs, "steps": options.steps, "recipe": RECIPE}
            for row in run(name, model, data, options.budgets, options.steps, options.repeats):
                print(json.dumps(row), flush=True)
                rows.append(row)
                results.save(file, {"settings": settings, "rows": rows})
    results.publish(file, tables({"rows": rows}))


if __name__ == "__main__":
    main()
