"""YOLO on coco128: mAP right after the cut and after equal fine-tuning, and latency, against Torch-Pruning's way.

    python -m benchmarks.yolo [--quick] [--data FOLDER] [--networks yolov8n yolo11n] [--budgets 60 40]
                              [--epochs 100] [--steps 320] [--rounds 1 16] [--size 192] [--images 128] [--dense FOLDER]

A network from its YAML is trained on the 128 images of coco128 at 192 pixels and evaluated on the same images, as
Ultralytics' coco128.yaml does: enough to compare what a cut leaves, not a detector. `compress` uses the packaged recipe
`yolo_half` with another budget. Torch-Pruning follows its script for YOLOv8 (`benchmarks/torch_pruning_yolo.py`): the
same fraction of the channels of every layer, in 16 rounds with fine-tuning after each, and also in one round, after
which all fine-tuning follows. Every row takes the same number of training steps by Ultralytics' trainer with the dense
network as teacher; Torch-Pruning takes as many more as the search of `compress` has. Every row is fine-tuned at each of
`TUNINGS`; the table shows the better one.
"""

from __future__ import annotations

import copy
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import compress
import compress.yolo
from compress.budget import compare_latency, latency_ratio
from compress.exporters import OnnxRunner
from compress.progress import ProgressDisplay
from compress.recipe import Recipe
from compress.training import Engine, FineTuneJob

from . import results
from .torch_pruning_yolo import ROUNDS, cut_to_macs, split_blocks
from .zoo import count_macs

BATCH, SEED = 16, 0
RECIPE = "yolo_half"
# The images are learned by heart: weak augmentation, and an optimizer step for each batch.
SETTINGS: dict[str, Any] = {"batch": BATCH, "nbs": BATCH, "mosaic": 0.0, "scale": 0.1}
SETTINGS |= {"translate": 0.05, "hsv_h": 0.0, "hsv_s": 0.2, "hsv_v": 0.2, "erasing": 0.0, "close_mosaic": 0}
DENSE_TRAINING = {"optimizer": "AdamW", "lr0": 2e-3, "warmup_epochs": 2}
# Ultralytics' own choice (AdamW at 1.2e-4 for 80 classes), and half of the rate of the dense training.
TUNINGS: dict[str, dict[str, Any]] = {"auto": {}, "AdamW 1e-3": {"optimizer": "adamw", "lr": 1e-3}}
WARMUP = 0.1  # of the steps; Ultralytics' three epochs would be most of a short training
METRICS = ("mAP50-95(B)", "mAP50(B)")


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


def train_dense(name: str, data: Path, epochs: int, weights: Path, size: int) -> Any:
    """Return the YOLO with the weights in a file; train it and write the file if there is none."""
    torch.manual_seed(SEED)
    model = compress.yolo.build(f"{name}.yaml")
    if not weights.exists():
        with tempfile.TemporaryDirectory() as folder:
            settings = {**SETTINGS, **DENSE_TRAINING, "imgsz": size, "data": str(data), "project": folder, "seed": SEED}
            model.train(epochs=epochs, val=False, plots=False, amp=False, device="cpu", workers=0, **settings)
        weights.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in model.model.state_dict().items()}, weights)
        model = compress.yolo.build(f"{name}.yaml")
    model.model.load_state_dict(load_file(weights))
    model.model.eval()
    return model


def export_runner(network: nn.Module, folder: Path, name: str, size: int) -> OnnxRunner:
    """Return the ONNX file of a network, written by Ultralytics' exporter, in onnxruntime."""
    copied: Any = copy.deepcopy(network)
    copied.pt_path = str(folder / f"{name}.pt")  # it writes beside it
    file = compress.yolo.PrunedYOLO(copied, image_size=size).export(format="onnx", device="cpu")
    return OnnxRunner(file)


class Comparison:
    """Prunes one dense network in both ways and fine-tunes the results for the same number of steps."""

    def __init__(self, model: Any, data: Path, steps: int, size: int) -> None:
        self.dense, self.steps, self.size = model.model, steps, size
        self.task = compress.yolo.task(model, data=data, seed=SEED, val=False, imgsz=size, **SETTINGS)
        self.engine = Engine(torch.device("cpu"), SEED, ProgressDisplay(quiet=True))
        self.image = torch.rand(1, 3, size, size)
        self.dense_macs = count_macs(self.dense, self.image)
        recipe = Recipe.load(RECIPE)
        assert recipe.search is not None
        self.search_steps = recipe.search.epochs.steps(len(self.task.train or ()))

    def tune(self, network: nn.Module, plan: compress.Plan, steps: int, tuning: str) -> None:
        """Fine-tune a network in place."""
        finetune = {"epochs": f"{steps} steps", "warmup": WARMUP, **TUNINGS[tuning]}
        config = Recipe.load({"extends": RECIPE, "finetune": finetune}).finetune
        assert config is not None
        self.task.finetune(FineTuneJob(network, self.dense, plan, config, self.engine, steps))

    def metrics(self, network: nn.Module) -> dict[str, float]:
        """Return the metrics of a network, from 0 to 1."""
        values = self.task.evaluate(network.eval(), ())
        return {metric: values[metric] for metric in METRICS}

    def compress(self, fraction: float) -> Iterator[dict[str, Any]]:
        """Cut by the recipe, then fine-tune."""
        recipe = {"extends": RECIPE, "budget": f"{fraction:.0%}", "seed": SEED, "finetune": None}
        recipe |= {"timing": {"repeats": 3}}
        pruned = compress.prune(self.dense, recipe, task=self.task, quiet=True)
        after_cut = self.metrics(pruned.model)
        for tuning in TUNINGS:
            network = copy.deepcopy(pruned.model)
            self.tune(network, pruned.plan, self.steps, tuning)
            yield {"tuning": tuning, "network": network, "after_cut": after_cut, "tuned": self.metrics(network)}

    def torch_pruning(self, fraction: float, rounds: int) -> Iterator[dict[str, Any]]:
        """Cut and fine-tune in rounds; MACs fall by the same factor in each."""
        total = self.steps + self.search_steps
        for tuning in TUNINGS:
            network, result = split_blocks(self.dense), dict[str, Any]()
            for number in range(1, rounds + 1):
                network = cut_to_macs(network, fraction ** (number / rounds) * self.dense_macs, self.size)
                if rounds == 1:
                    result["after_cut"] = self.metrics(network)
                steps = total * number // rounds - total * (number - 1) // rounds
                self.tune(network, compress.Plan({}, {}), steps, tuning)
            yield {"tuning": tuning, "network": network, **result, "tuned": self.metrics(network)}

    def costs(self, network: nn.Module, repeats: int) -> dict[str, Any]:
        """Return what is left of MACs, parameters and the latency of the ONNX file."""
        parameters = [sum(p.numel() for p in net.parameters()) for net in (network, self.dense)]
        with tempfile.TemporaryDirectory() as folder:
            networks = {"dense": self.dense, "cut": network}
            runners = [export_runner(net, Path(folder), part, self.size) for part, net in networks.items()]
            times = compare_latency(runners, self.image, repeats)
        return {
            "macs_left": count_macs(network, self.image) / self.dense_macs,
            "params_left": parameters[0] / parameters[1],
            "latency_ms": [t.median for t in times],
            "latency_left": latency_ratio(times[0], times[1]).value,
        }


def run(
    name: str, model: Any, data: Path, percents: list[int], steps: int, repeats: int, rounds: list[int], size: int
) -> Iterator[dict[str, Any]]:
    """Prune one network to each budget in each way; yield the rows."""
    comparison = Comparison(model, data, steps, size)
    dense = comparison.metrics(model.model)
    ways: dict[str, Callable[[float], Iterator[dict[str, Any]]]] = {"compress": comparison.compress}
    for number in rounds:
        name_of_rival = f"torch-pruning, {number} round{'s' * (number > 1)}"
        ways[name_of_rival] = partial(comparison.torch_pruning, rounds=number)
    for percent, method in itertools.product(percents, ways):
        start = time.perf_counter()
        row: dict[str, Any] = {"network": name, "budget": percent, "method": method, "seed": SEED, "dense": dense}
        try:
            tuned = list(ways[method](percent / 100))
            best = max(tuned, key=lambda result: result["tuned"][METRICS[0]])
            row |= {key: best[key] for key in ("after_cut", "tuned", "tuning") if key in best}
            row["tunings"] = {result["tuning"]: result["tuned"] for result in tuned}
            row |= comparison.costs(best["network"], repeats)
        except Exception as error:  # of the rival, or of its pruned network
            if method == "compress":
                raise
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        yield {**row, "seconds": round(time.perf_counter() - start)}


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
    parser.add_argument("--size", type=int, default=192, help="pixels of the images")
    parser.add_argument("--images", type=int, help="the first so many; default: all")
    parser.add_argument("--epochs", type=int, default=100, help="of the dense training")
    parser.add_argument("--steps", type=int, default=320, help="of the fine-tuning, in all rounds together")
    parser.add_argument("--rounds", nargs="+", type=int, default=[1, ROUNDS], help="of Torch-Pruning")
    parser.add_argument("--dense", type=Path, help="folder of dense weights, written if they are not there")
    parser.add_argument("--repeats", type=int, default=50, help="timed runs")
    options = parser.parse_args()
    if options.quick:
        options.networks, options.budgets, options.epochs, options.images = ["yolov8n"], [60], 1, 16
        options.steps, options.repeats, options.rounds = 2, 5, [1, 2]
    torch.set_num_threads(1)
    file = results.result_name("yolo", options.quick)
    rows = [row for row in results.load(file).get("rows", []) if row["network"] not in options.networks]
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(options.data / "coco128", Path(folder) / "coco128", options.images)
        dense = Path(folder) if options.dense is None else options.dense
        for name in options.networks:
            model = train_dense(name, data, options.epochs, dense / f"{name}.safetensors", options.size)
            settings = {
                "size": options.size,
                "images": options.images,
                "epochs": options.epochs,
                "steps": options.steps,
                "recipe": RECIPE,
            }
            lengths = (options.steps, options.repeats, options.rounds, options.size)
            for row in run(name, model, data, options.budgets, *lengths):
                print(json.dumps(row), flush=True)
                rows.append(row)
                results.save(file, {"settings": settings, "rows": rows})
    results.publish(file, tables({"rows": rows}))


if __name__ == "__main__":
    main()
