"""The default recipe: a budget alone, against recipes made by hand, with labels and without.

    python -m benchmarks.default [--quick] [--data FOLDER] [--images 4800] [--only NAME] [--vit FOLDER] [--vit-epochs 6]

No key is given but the budget of 50 % of the MACs. Digits: the network of the quickstart and a small ViT, trained here.
CIFAR-10: ResNet-20 and the ViT of benchmarks/vit.py on labelled training images (75 batches of 64, so 100 search steps
and 400 of fine-tuning), and ResNet-20 on 100 images without labels. 1000 held-out training images choose the best
weights; the accuracy is measured on 5000 test images, on the digits on those that the networks were not trained on.
Results of an earlier run are kept for rows that `--only` leaves out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import compress
from compress.cli.quickstart import train_network
from compress.data import loaders
from compress.recipe import Data

from . import data, results, vit
from .models import load_cifar_resnet

BATCH, UNLABELLED, BUDGET = 64, 100, "50%"
TEACHER = {"temperature": 4, "weight": 8}
HAND_MADE_VIT: dict[str, Any] = {  # the settings of benchmarks/transformer.py
    "target": {"channels": False, "attention": True, "mlp": True, "round_to": 1},
    "budget": {"macs": BUDGET},
    "search": {"method": "netslim", "epochs": "100 steps", "optimizer": "adamw", "lr": 5e-4, "weight_decay": 0.05},
    "finetune": {"epochs": "400 steps", "optimizer": "adamw", "lr": 1e-4, "weight_decay": 0.05, "distill": TEACHER},
}


class Task(NamedTuple):
    """A dense network with its data: `train` has labels or not, `val` chooses weights, `test` measures them."""

    dense: nn.Module
    train: Any
    val: DataLoader[Any]
    test: DataLoader[Any]


def digits(dense: nn.Module) -> Task:
    """Return the digits as scikit-learn has them, split as in the quickstart; half of the held-out ones choose."""
    train, val = loaders(Data(source="digits", batch_size=BATCH))
    assert val is not None
    held_out = [torch.cat(parts) for parts in zip(*val, strict=True)]
    halves = [DataLoader(TensorDataset(*(t[start::2] for t in held_out)), 500) for start in (0, 1)]
    return Task(dense, train, *halves)


def cifar(options: Any, network: str, labelled: bool) -> Task:
    """Return ResNet-20 or the ViT with training images, with labels and augmentation, or a few without."""
    folder: Path = options.data
    count = 640 if options.quick else options.images
    train: Any = data.load_cifar10(folder, "train", UNLABELLED)[0]
    if labelled:
        images: Dataset[Any] = data.CropFlipDataset(*data.load_cifar10(folder, "train", count))
        train = DataLoader(images, BATCH, shuffle=True, drop_last=True)
    val = DataLoader(TensorDataset(*data.load_cifar10(folder, "train", 200 if options.quick else 1000, 45000)), 500)
    test = DataLoader(TensorDataset(*data.load_cifar10(folder, "test", 500 if options.quick else 5000)), 500)
    if network != "vit":
        return Task(load_cifar_resnet(network, folder), train, val, test)
    return Task(vit.load_or_train(folder, options.vit, options.vit_epochs), train, val, test)


def digits_vit(quick: bool) -> nn.Module:
    """Train a small ViT on the digits, patches of 2 x 2 pixels."""
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=4, num_heads=4, mlp_ratio=4
    )
    train, _ = loaders(Data(source="digits", batch_size=BATCH))
    assert train is not None
    epochs = 2 if quick else 40
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, epochs * len(train))  # type: ignore[arg-type]
    for _ in range(epochs):
        for x, y in train:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: DataLoader[Any]) -> float:
    """Return the fraction of correctly classified images."""
    hits = [(model(x).argmax(1) == y).float() for x, y in images]
    return float(torch.cat(hits).mean())


def run(name: str, task: Task, recipe: Any) -> dict[str, Any]:
    """Prune with a recipe and measure before and after."""
    start = time.perf_counter()
    pruned = compress.prune(task.dense, recipe, train=task.train, val=task.val, device="cpu", quiet=True)
    report = pruned.report
    return {
        "name": name,
        "recipe": "the budget alone" if recipe == BUDGET else "made by hand",
        "seed": 0,
        "dense": accuracy(task.dense, task.test),
        "after_cut": report.sliced["accuracy"],
        "accuracy": accuracy(pruned.model.eval(), task.test),
        "macs_left": report.pruned.macs / report.dense.macs,
        "seconds": round(time.perf_counter() - start),
        "says": next((note for note in report.notes if note.startswith("default recipe")), ""),
    }


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the table of all rows."""
    lines = [
        [
            row["name"],
            row["recipe"],
            f"{row['macs_left']:.1%}",
            *(f"{100 * row[key]:.1f}" for key in ("dense", "after_cut", "accuracy")),
            str(row["seconds"]),
        ]
        for row in content["rows"]
    ]
    head = ("network and data", "recipe", "MACs left", "dense, %", "after the cut (held-out images), %", "end, %", "s")
    return [results.ResultTable(head, lines)]


def main() -> None:
    parser = results.make_parser(__doc__, data=True)
    parser.add_argument("--images", type=int, default=4800, help="labelled training images of CIFAR-10")
    parser.add_argument("--only", default="", help="run only rows whose name contains this text")
    vit.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tasks: dict[str, tuple[Callable[[], Task], Any]] = {
        "quickstart network, digits": (lambda: digits(train_network(quiet=True)), "quickstart"),
        "small ViT, digits": (lambda: digits(digits_vit(options.quick)), HAND_MADE_VIT),
        "ResNet-20, CIFAR-10, 100 images without labels": (lambda: cifar(options, "resnet20", labelled=False), None),
        f"ResNet-20, CIFAR-10, {options.images} labelled images": (
            lambda: cifar(options, "resnet20", labelled=True),
            None,
        ),
        f"ViT, CIFAR-10, {options.images} labelled images": (
            lambda: cifar(options, "vit", labelled=True),
            HAND_MADE_VIT,
        ),
    }
    if options.quick:
        del tasks[f"ViT, CIFAR-10, {options.images} labelled images"]  # its training takes too long
    file = results.result_name("default", options.quick)
    rows = [row for row in results.load(file).get("rows", []) if options.only and options.only not in row["name"]]
    for name, (build, hand_made) in tasks.items():
        if options.only in name:
            task = build()
            recipes = [BUDGET] if hand_made is None or options.quick else [BUDGET, hand_made]
            for recipe in recipes:
                rows.append(run(name, task, recipe))
                results.save(file, {"rows": rows})
    results.publish(file, tables({"rows": rows}))


if __name__ == "__main__":
    main()
