"""Accuracy right after the cut without any training: closed-form repair against plain cuts and Torch-Pruning.

    python -m benchmarks.repair [--quick] [--data FOLDER] [--only NETWORK ...] [--vit FOLDER] [--vit-epochs 6]

No labels are used but for `taylor`, whose importance is measured by the loss. CIFAR-10 ResNets and the ViT of
benchmarks/vit.py are calibrated on 1024 training images and measured on 2000 test images; EfficientNet-Lite0 is
calibrated on 500 ImageNet photographs and measured on the other 500. Every row cuts with `ranking: auto`. The seconds
are CPU seconds of the repair alone. An interrupted run resumes where it stopped.

`python -m benchmarks.repair_steps` measures the accuracy after some fine-tuning.

`least squares, largest` keeps the dimensions that the ranking keeps; `least squares` keeps as many, but those that best
predict the others, as `compress.prune` does.
"""

from __future__ import annotations

import argparse
import copy
import io
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch_pruning as tp
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from compress.budget import choose_widths
from compress.errors import BudgetError
from compress.graph import Groups
from compress.recipe import Budget, Ranking, Target
from compress.search import Job, search_class
from compress.search import base as search
from compress.surgery import Plan, compensate_, find_groups, prefer_predictors, repair_, slice_
from compress.training import Classification

from . import data, results, vit
from .models import load_cifar_resnet
from .torch_pruning_zoo import qkv_heads, set_widths_
from .zoo import count_macs

MACS_LEFT = {
    "resnet20": (0.7, 0.5, 0.35),
    "resnet56": (0.7, 0.5, 0.35),
    "vit": (0.7, 0.5),
    "lite0": (0.9, 0.8, 0.7, 0.6),
}
SUMMARY = {
    "resnet20": "ResNet-20, CIFAR-10",
    "resnet56": "ResNet-56, CIFAR-10",
    "lite0": "EfficientNet-Lite0, ImageNet",
}
SEARCHES = ("magnitude", "taylor")
REPAIRS = ("plain", "mean", "least squares, largest", "least squares")
TAYLOR_BATCHES = 8
Row = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A trained network, its calibration images with labels, its test images, and the groups that are cut."""

    model: nn.Module
    images: Tensor
    labels: Tensor
    test: tuple[Tensor, Tensor]
    batch: int
    target: Target

    @property
    def batches(self) -> list[Tensor]:
        """Return the calibration images in batches."""
        return list(torch.split(self.images, self.batch))

    def accuracy(self, model: nn.Module) -> float:
        """Return the fraction of test images that a model classifies correctly."""
        with torch.inference_mode():
            correct = [(model(x).argmax(1) == y).sum() for x, y in DataLoader(TensorDataset(*self.test), 100)]
        return int(sum(correct)) / len(self.test[1])


def load_subject(name: str, options: argparse.Namespace) -> Subject:
    """Load a network and its images.

    Raises:
        FileNotFoundError: weights or images are missing.
    """
    if name == "lite0":
        return _load_lite0(options.data, options.quick)
    calibration, test = (128, 200) if options.quick else (1024, 2000)
    images, labels = data.load_cifar10(options.data, "train", calibration)
    test_data = data.load_cifar10(options.data, "test", test)
    if name == "vit":
        target = Target(channels=False, attention=True, mlp=True)
        model = vit.load_or_train(options.data, options.vit, options.vit_epochs)
        return Subject(model, images, labels, test_data, 64, target)
    return Subject(load_cifar_resnet(name, options.data), images, labels, test_data, 64, Target())


def _load_lite0(folder: Path, quick: bool) -> Subject:
    import timm

    model = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    model.load_state_dict(load_file(folder / "models" / "efficientnet_lite0.safetensors"))
    with np.load(folder / "imagenet1000" / "images.npz") as archive:
        jpeg, offset, label = (archive[key] for key in ("jpeg", "offset", "label"))
    order = torch.randperm(len(label), generator=torch.Generator().manual_seed(0))[: 100 if quick else None]
    files = (io.BytesIO(jpeg[offset[i] : offset[i + 1]].tobytes()) for i in order.tolist())
    pixels = np.stack([np.asarray(Image.open(file).convert("RGB"))[16:240, 16:240] for file in files])
    images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() - 127) / 128
    labels = torch.from_numpy(label.astype(np.int64))[order]
    half = len(order) // 2
    return Subject(model.eval(), images[:half], labels[:half], (images[half:], labels[half:]), 25, Target())


def importance_of(method: str, subject: Subject, groups: Groups) -> dict[str, Tensor]:
    """Return the importance of all dimensions; taylor reads a few batches with their labels."""
    config = search.config_class(method)(method=method)
    if config.length is None:
        return search.data_free_importance(config, subject.model, groups)
    taylor = search_class(method)(config, Job(copy.deepcopy(subject.model), groups, Classification(), TAYLOR_BATCHES))
    for x, y in zip(subject.batches[:TAYLOR_BATCHES], torch.split(subject.labels, subject.batch), strict=False):
        taylor.step((x, y))
    return taylor.importance()


def _forward(model: nn.Module, x: Tensor) -> Any:
    return model(x)


def cut(
    subject: Subject, groups: Groups, importance: Mapping[str, Tensor], macs_left: float, ranking: Ranking, repair: str
) -> tuple[nn.Module, Any, float]:
    """Return the network cut and repaired, the kept dimensions, and the seconds of the repair."""
    start = time.process_time()
    if repair == "least squares":
        importance, _ = prefer_predictors(subject.model, groups, importance, subject.batches, _forward)
    keep = choose_widths(groups, importance, Budget(macs=macs_left), subject.target, ranking=ranking)
    plan, model = Plan.build(subject.model, groups, keep), copy.deepcopy(subject.model)
    if repair == "mean":
        compensate_(model, groups, plan, subject.batches[:4])
    slice_(model, plan)
    if repair.startswith("least squares"):
        repair_(model, subject.model, plan, subject.batches, _forward)
    return model.eval(), keep, time.process_time() - start


def measure_ours(name: str, subject: Subject, groups: Groups) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the key of each row and the function that measures it."""
    importance: dict[str, dict[str, Tensor]] = {}

    def measure(macs_left: float, method: str, repair: str) -> Row:
        if method not in importance:
            importance[method] = importance_of(method, subject, groups)
        ranking = search.config_class(method)(method=method).ranking_for(groups, "macs")
        try:
            model, keep, seconds = cut(subject, groups, importance[method], macs_left, ranking, repair)
        except BudgetError as error:
            return {"error": str(error)}
        return {"accuracy": subject.accuracy(model), "seconds": seconds, "narrowest": _narrowest(groups, keep)}

    for macs_left, method, repair in product(MACS_LEFT[name], SEARCHES, REPAIRS):
        yield f"{name} {macs_left} {method} {repair}", partial(measure, macs_left, method, repair)


def _narrowest(groups: Groups, keep: Any) -> float:
    return min(len(keep[group.name]) / group.width for group in groups)


TP_IMPORTANCES = {"magnitude": tp.importance.GroupMagnitudeImportance, "taylor": tp.importance.GroupTaylorImportance}


def cut_with_torch_pruning(
    subject: Subject, groups: Groups, macs_left: float, method: str, global_pruning: bool
) -> nn.Module:
    """Return a copy that Torch-Pruning has cut to the MACs, in the dimensions of the layers that ours cuts."""
    model, example = copy.deepcopy(subject.model), subject.images[:1]
    modules = dict(model.named_modules())
    written = {slot.tensor.rpartition(".")[0] for group in groups for slot in group.output_slots}
    cut_layers = {id(modules[path]) for path in written if path in modules}
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    heads = qkv_heads(model)
    for attention in [m for m in model.modules() if hasattr(m, "fused_attn")]:
        attention.fused_attn = False  # the fused kernel would scale the logits by the new width
    pruner = tp.pruner.BasePruner(
        model,
        example,
        importance=TP_IMPORTANCES[method](),
        global_pruning=global_pruning,
        pruning_ratio=1.0,
        iterative_steps=200,
        ignored_layers=[m for m in layers if id(m) not in cut_layers],
        num_heads=heads,
        prune_head_dims=bool(heads),
        in_channel_groups={},
        out_channel_groups={},
    )
    if method == "taylor":
        for x, y in zip(subject.batches[:TAYLOR_BATCHES], torch.split(subject.labels, subject.batch), strict=False):
            (F.cross_entropy(model(x), y) / TAYLOR_BATCHES).backward()
    dense_macs = count_macs(model, example)
    while count_macs(model, example) > macs_left * dense_macs:
        pruner.step()
        set_widths_(model)
    return model


def measure_torch_pruning(name: str, subject: Subject, groups: Groups) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the rows of Torch-Pruning."""

    def measure(macs_left: float, method: str, global_pruning: bool) -> Row:
        start = time.process_time()
        model = cut_with_torch_pruning(subject, groups, macs_left, method, global_pruning)
        seconds, example = time.process_time() - start, subject.images[:1]
        return {
            "accuracy": subject.accuracy(model),
            "seconds": seconds,
            "macs": count_macs(model, example) / count_macs(subject.model, example),
        }

    for macs_left, method, is_global in product(MACS_LEFT[name], TP_IMPORTANCES, (False, True)):
        label = "global" if is_global else "local"
        yield f"{name} {macs_left} tp {method} {label}", partial(measure, macs_left, method, is_global)


def run_network(name: str, options: argparse.Namespace, rows: dict[str, Row]) -> Iterator[None]:
    """Measure the rows of a network that are missing; yield after each."""
    subject = load_subject(name, options)
    groups = find_groups(subject.model, subject.images[:1], subject.target)
    if f"{name} dense" not in rows:
        start = time.process_time()
        with torch.inference_mode():
            for x in subject.batches:
                subject.model(x)
        forward_seconds = time.process_time() - start
        rows[f"{name} dense"] = {"accuracy": subject.accuracy(subject.model), "seconds": forward_seconds}
        yield
    measurements = [*measure_ours(name, subject, groups), *measure_torch_pruning(name, subject, groups)]
    for key, measure in sorted(measurements, key=lambda item: _priority(item[0])):
        if key not in rows and not (options.quick and ("0.35" in key or "0.7 " in key)):
            try:
                rows[key] = measure()
            except Exception as error:  # of Torch-Pruning, on networks that it does not understand
                rows[key] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
            print(key, rows[key], flush=True)
            yield


def _priority(key: str) -> int:
    """Return the place of a row in a run, which may be stopped: the rows that decide come first."""
    first = ("magnitude least squares", "magnitude plain", "tp magnitude local", "taylor least squares", "taylor plain")
    return next((i for i, part in enumerate(first) if part in key), len(first))


def best_rival(rows: Mapping[str, Row], name: str, macs_left: float) -> tuple[float, str] | None:
    """Return the best accuracy of Torch-Pruning, and how it was reached."""
    start = f"{name} {macs_left} tp "
    found = [(row["accuracy"], key.removeprefix(start)) for key, row in rows.items() if key.startswith(start)]
    return max(found, default=None)


def summary(content: dict[str, Any]) -> results.ResultTable:
    """Compare plain cuts by magnitude, the repaired ones, and Torch-Pruning, as shown in the README."""
    rows, lines = content["rows"], []
    for name, macs_left in [(network, left) for network in SUMMARY for left in MACS_LEFT[network]]:
        repaired, rival = rows.get(f"{name} {macs_left} magnitude least squares"), best_rival(rows, name, macs_left)
        if repaired is None or rival is None:
            continue
        dense, plain = rows[f"{name} dense"], rows[f"{name} {macs_left} magnitude plain"]
        percents = [f"{100 * row['accuracy']:.1f}" for row in (dense, plain, repaired)]
        line = [
            SUMMARY[name],
            f"{macs_left:.0%}",
            *percents[:2],
            f"**{percents[2]}**",
            f"{100 * rival[0]:.1f} ({rival[1]})",
        ]
        lines.append(line)
    head = ("network", "MACs left", "dense, %", "cut, %", "cut and repaired, %", "Torch-Pruning's best, %")
    return results.ResultTable(head, lines)


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return one table per network."""
    rows, all_tables = content["rows"], []
    for name, fractions in MACS_LEFT.items():
        if f"{name} dense" not in rows:
            continue
        dense = rows[f"{name} dense"]
        lines = []
        for macs_left in fractions:
            found = best_rival(rows, name, macs_left)
            rival = f"{100 * found[0]:.1f} ({found[1]})" if found else "-"
            for method in SEARCHES:
                cells = [rows.get(f"{name} {macs_left} {method} {repair}", {}) for repair in REPAIRS]
                if not any(cells):
                    continue
                texts = [f"{100 * cell['accuracy']:.1f}" if "accuracy" in cell else "-" for cell in cells]
                repaired = cells[-1] or cells[-2]
                seconds = f"{repaired['seconds']:.1f}" if "seconds" in repaired else "-"
                lines.append([f"{macs_left:.0%}", method, *texts[:3], f"**{texts[3]}**", seconds, rival])
        title = f"{name}: dense {dense['accuracy']:.1%}; a forward pass over the calibration images takes "
        title += f"{dense['seconds']:.1f} CPU seconds"
        head = (
            "MACs left",
            "search",
            "plain, %",
            "mean, %",
            "least squares, largest, %",
            "least squares, %",
            "repair, CPU s",
            "Torch-Pruning's best, %",
        )
        all_tables.append(results.ResultTable(head, lines, title))
    return all_tables


def main() -> None:
    parser = results.make_parser(__doc__, data=True)
    parser.add_argument("--only", nargs="+", choices=MACS_LEFT, default=list(MACS_LEFT), help="networks to measure")
    vit.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = results.result_name("repair", options.quick)
    rows: dict[str, Row] = {} if options.quick else results.load(file).get("rows", {})
    names = ["resnet20"] if options.quick else options.only
    stages = [run_network(name, options, rows) for name in names]
    for stage in stages:
        for _ in stage:
            results.save(file, {"rows": rows})
    results.publish(file, tables({"rows": rows}))


if __name__ == "__main__":
    main()
