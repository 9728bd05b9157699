"""What a search costs: time per training sample and peak memory, relative to a plain training loop.

    python -m benchmarks.search_cost [--repeats 15] [--threads 1] [--only curvature]

CIFAR ResNet-20 with batches of 128, and a small ViT. The plain loop is written directly in PyTorch. Times are medians
over steps that are taken in turn; a step on a pair of batches counts for its two batches. Memory is the most that
tensors hold at once, weights, gradients and optimiser state along, as torch's allocator reports it.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import compress
from compress.curvature import Curvature, Kind
from compress.display import Display
from compress.gates import attach_, fold_
from compress.groups import Groups
from compress.line import Line
from compress.recipe import Recipe
from compress.search import Job, search_class
from compress.search.bayesnas import SHARE
from compress.shell import shell

from . import data, results
from .models import CifarResNet, cifar_resnet

EPOCH = 50000  # images, of CIFAR-10
BARS = {"netslim": (1.05, 1.02), "rarts exact": (1.75, None), "rarts fused": (1.10, None)}
FIXED = {"gamma": 1e-4}
SEARCHES: dict[str, dict[str, Any]] = {
    "netslim": {"method": "netslim", **FIXED},
    "netslim auto": {"method": "netslim"},
    "rarts exact": {"method": "rarts", **FIXED},
    "rarts fused": {"method": "rarts", "update": "fused", **FIXED},
    "rarts fused auto": {"method": "rarts", "update": "fused"},
    "darts1": {"method": "darts1", **FIXED},
    "darts2": {"method": "darts2", **FIXED},
    "milenas": {"method": "milenas", **FIXED},
    "bayesnas": {"method": "bayesnas", "gamma": 1e-2},
    "bayesnas auto": {"method": "bayesnas"},
}
Step = Callable[[], int]  # makes a step, and returns how many batches it was


def resnet() -> tuple[nn.Module, Tensor]:
    return CifarResNet(20), torch.randn(128, 3, 32, 32)


def vit() -> tuple[nn.Module, Tensor]:
    kind = {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 6, "num_heads": 3, "num_classes": 10}
    return timm.models.VisionTransformer(**kind), torch.randn(64, 3, 32, 32)


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """A training loop as everybody writes it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)

    def step() -> int:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return 1

    return step


def searching(name: str, model: nn.Module, groups: Groups, x: Tensor, y: Tensor) -> Step:
    recipe = Recipe.load({"budget": {"macs": "50%"}, "search": {**SEARCHES[name], "epochs": "1000 steps"}})
    line = Line(recipe, groups, shell(model), model, x, None, 0, Display(quiet=True))
    job = Job(model, groups, compress.Classification(), 1000, line=line)
    search = search_class(recipe.search.method)(recipe.search, job)
    batch: Any = (x, y) if search.reads == 1 else ((x, y), (x.clone(), y.clone()))

    def step() -> int:
        search.step(batch)
        return search.reads

    return step


def peak(make: Callable[[], Step]) -> int:
    """The most bytes held at once while a step's owner is made and makes three steps."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step = make()
        for _ in range(3):
            step()
    held = [event.nbytes() for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    return int(np.cumsum(held).max())


def measure(make: Callable[[], tuple[nn.Module, Tensor]], repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, x = make()
    y = torch.randint(0, 10, (len(x),))
    groups = compress.find_groups(model.eval(), x[:1])
    model.train()

    def owner(name: str) -> Step:
        mine = copy.deepcopy(model)
        return plain(mine, x, y) if name == "plain loop" else searching(name, mine, groups, x, y)

    names = ["plain loop", *SEARCHES]
    memory = {name: peak(lambda name=name: owner(name)) for name in names}  # type: ignore[misc]
    steps = {name: owner(name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            batches = step()
            if repeat >= 2:
                seconds[name].append((time.perf_counter() - start) / batches)
    rows = []
    for name in names:
        parts = np.array(seconds[name]) / np.array(seconds["plain loop"])
        low, high = np.percentile(parts, [25, 75])
        rows.append(
            {
                "search": name,
                "ms_per_sample": 1e3 * median(seconds[name]) / len(x),
                "time": float(np.median(parts)),
                "time_quartiles": [float(low), float(high)],
                "memory": memory[name] / memory["plain loop"],
                "peak_mb": memory[name] / 2**20,
            }
        )
    return rows


def curvature(repeats: int, folder: Path) -> dict[str, Any]:
    """What bayesnas's curvature takes of the epoch that it closes, and how well few samples rank the dimensions.

    On a trained ResNet-20 and real images. The full ranking is that of all 8192 images; the sub-sampled one is as in
    a search: 5 % of an epoch of 50000.
    """
    model = cifar_resnet("resnet20", folder)
    x, y = data.cifar10(folder, "train", 8192)
    groups = compress.find_groups(model.eval(), x[:1])
    scores, task = attach_(model, groups), compress.Classification()

    def sampled(index: Tensor, kind: Kind = "auto") -> tuple[Tensor, float]:
        found, start = Curvature(model, groups, scores, kind), time.perf_counter()
        found.add_(task, (x[index], y[index]), len(index))
        return torch.cat(list(found.mean()[0].values())), time.perf_counter() - start

    torch.manual_seed(0)
    count = round(SHARE * EPOCH)
    full = sampled(torch.arange(len(x)))[0]
    halves = [sampled(part)[0] for part in torch.randperm(len(x)).chunk(2)]
    few = [sampled(torch.randperm(len(x))[:count]) for _ in range(3)]
    rough = sampled(torch.randperm(len(x))[:count], "paper")[0]

    def training() -> Step:
        return plain(copy.deepcopy(fold_(copy.deepcopy(model))).train(), x[:128], y[:128])

    def looking() -> Step:
        mine = Curvature(model, groups, scores, "auto")

        def step() -> int:
            mine.add_(task, (x[:128], y[:128]), 32)
            return 1

        return step

    seconds, step = [], training()
    for _ in range(repeats + 2):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    epoch = median(seconds[2:]) * EPOCH / 128
    return {
        "samples": count,
        "spearman": [spearman(v, full) for v, _ in few],
        "spearman_of_halves": spearman(*halves),
        "spearman_paper": spearman(rough, full),
        "ratio_paper": float((rough / full.clamp_min(1e-30)).median()),
        "part_of_epoch": median(t for _, t in few) / epoch,
        "memory": peak(looking) / peak(training),
    }


def spearman(a: Tensor, b: Tensor) -> float:
    ranks = torch.stack([v.argsort().argsort().double() for v in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["curvature", "searches"], default=None)
    data.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.only != "searches":
        row = curvature(options.repeats, options.data)
        print("curvature of the scores:", row, flush=True)
        results.save("search_cost", results.load("search_cost") | {"curvature": row})
    if options.only == "curvature":
        return
    known, found = results.load("search_cost").get("curvature"), {}
    for name, make in (("resnet20, batch 128", resnet), ("vit 192 x 6, batch 64", vit)):
        found[name] = measure(make, options.repeats)
        table = Table("search", "ms per sample", "time", "quartiles", "memory", "bars (time, memory)", title=name)
        for row in found[name]:
            low, high = row["time_quartiles"]
            bar = BARS.get(row["search"], (None, None)) if make is resnet else (None, None)
            table.add_row(
                row["search"],
                f"{row['ms_per_sample']:.2f}",
                f"{row['time']:.3f}",
                f"{low:.3f} .. {high:.3f}",
                f"{row['memory']:.3f}",
                ", ".join("-" if b is None else f"{b}" for b in bar),
            )
        results.console().print(table)
        told = {"threads": options.threads, "repeats": options.repeats, "networks": found, "curvature": known}
        results.save("search_cost", told)


if __name__ == "__main__":
    main()
