"""What a search costs: time per training sample and peak memory, relative to a plain training loop.

    python -m benchmarks.search_cost [--quick] [--repeats 15] [--threads 1] [--network vit_s] [--only curvature]

CIFAR ResNet-20 with batches of 128, a small ViT, and ViT-S with the dimensions of attention and MLPs scored, by few
searches only since its steps are long. What `--network` does not name keeps the results it has. The plain loop is
written directly in PyTorch. Times are medians over steps that are taken in turn; a step on a pair of batches counts for
its two batches. Memory is the most that tensors hold at once, weights, gradients and optimiser state along, as torch's
allocator reports it.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import compress
from compress.curvature import Curvature, Kind
from compress.display import Display
from compress.gates import attach_
from compress.groups import Groups
from compress.line import Line
from compress.recipe import Recipe, Target
from compress.search import Job, search_class
from compress.search.bayesnas import SHARE
from compress.shell import shell

from . import data, results
from .models import CifarResNet, cifar_resnet

EPOCH = 50000  # images, of CIFAR-10
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
QUICK = ("netslim", "netslim auto", "rarts fused")
Step = Callable[[], int]  # makes a step, and returns how many batches it was


@dataclass(frozen=True)
class Network:
    """What is trained, on how many images at once, what is scored, by which searches, and the bars (time, memory)."""

    title: str
    make: Callable[[], nn.Module]
    batch: int
    size: int = 32
    target: dict[str, Any] = field(default_factory=dict)
    searches: tuple[str, ...] = tuple(SEARCHES)
    bars: dict[str, tuple[float, float | None]] = field(default_factory=dict)


def vit(size: int, patch: int, width: int, depth: int, heads: int) -> nn.Module:
    kind = {"img_size": size, "patch_size": patch, "embed_dim": width, "depth": depth, "num_heads": heads}
    return timm.models.VisionTransformer(**kind, num_classes=10)


NETWORKS = {
    "resnet20": Network(
        "resnet20, batch 128",
        lambda: CifarResNet(20),
        128,
        bars={"netslim": (1.05, 1.02), "rarts exact": (1.75, None), "rarts fused": (1.10, None)},
    ),
    "vit": Network("vit 192 x 6, batch 64", lambda: vit(32, 4, 192, 6, 3), 64),
    "vit_s": Network(
        "vit_small_patch16_224, attention and mlp, batch 8",
        lambda: vit(224, 16, 384, 12, 6),
        8,
        224,
        {"channels": False, "attention": True, "mlp": True},
        ("netslim", "netslim auto", "rarts fused"),
        {"netslim": (1.05, 1.02)},
    ),
}


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """A training loop as everybody writes it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)

    def step() -> int:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return 1

    return step


def searching(name: str, target: dict[str, Any], model: nn.Module, groups: Groups, x: Tensor, y: Tensor) -> Step:
    search = {**SEARCHES[name], "epochs": "1000 steps"}
    recipe = Recipe.load({"target": target, "budget": {"macs": "50%"}, "search": search})
    line = Line(recipe, groups, shell(model), model, x, None, 0, Display(quiet=True))
    job = Job(model, groups, compress.Classification(), 1000, line=line)
    mine = search_class(recipe.search.method)(recipe.search, job)
    batch: Any = (x, y) if mine.reads == 1 else ((x, y), (x.clone(), y.clone()))

    def step() -> int:
        mine.step(batch)
        return mine.reads

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


def measure(network: Network, repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, x = network.make(), torch.randn(network.batch, 3, network.size, network.size)
    y = torch.randint(0, 10, (len(x),))
    groups = compress.find_groups(model.eval(), x[:1], Target(**network.target))
    model.train()

    def owner(name: str) -> Step:
        mine = copy.deepcopy(model)
        return plain(mine, x, y) if name == "plain loop" else searching(name, network.target, mine, groups, x, y)

    names = ["plain loop", *network.searches]
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
        return plain(cifar_resnet("resnet20", folder).train(), x[:128], y[:128])

    def looking() -> Step:
        mine = Curvature(model, groups, scores, "auto")

        def step() -> int:
            mine.add_(task, (x[:128], y[:128]), 32)
            return 1

        return step

    step, parts = training(), []
    for repeat in range(repeats + 2):  # in turn, as the machine may be busy
        start = time.perf_counter()
        step()
        taken = time.perf_counter() - start
        one = sampled(torch.arange(128))[1]
        if repeat >= 2:
            parts.append(one * count / (taken * EPOCH))
    return {
        "samples": count,
        "spearman": [spearman(v, full) for v, _ in few],
        "spearman_of_halves": spearman(*halves),
        "spearman_paper": spearman(rough, full),
        "ratio_paper": float((rough / full.clamp_min(1e-30)).median()),
        "part_of_epoch": median(parts),
        "memory": peak(looking) / peak(training),
    }


def spearman(a: Tensor, b: Tensor) -> float:
    ranks = torch.stack([v.argsort().argsort().double() for v in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def main() -> None:
    parser = results.options_of(__doc__, data=True)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["curvature", "searches"], default=None)
    parser.add_argument("--network", choices=[*NETWORKS], action="append", help="this one alone; may be given again")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    file = results.named("search_cost", options.quick)
    if options.quick:
        options.network, options.repeats = ["resnet20"], 3
    if options.only != "searches" and not options.network:
        row = curvature(options.repeats, options.data)
        print("curvature of the scores:", row, flush=True)
        results.save(file, results.load(file) | {"curvature": row})
    if options.only == "curvature":
        return
    found: dict[str, Any] = results.load(file).get("networks", {})
    for name in options.network or NETWORKS:
        network = NETWORKS[name]
        network = replace(network, searches=QUICK) if options.quick else network
        rows = measure(network, options.repeats)
        found[network.title] = {"threads": options.threads, "repeats": options.repeats, "rows": rows}
        results.save(file, results.load(file) | {"networks": found, "seed": 0})
        print(f"{network.title} done", flush=True)
    results.show(file, sheets(results.load(file)))


def sheets(content: dict[str, Any]) -> list[results.Sheet]:
    found = []
    for title, network in content["networks"].items():
        lines = []
        for row in network["rows"]:
            low, high = row["time_quartiles"]
            times = [f"{row['ms_per_sample']:.2f}", f"{row['time']:.3f}", f"{low:.3f} to {high:.3f}"]
            lines.append([row["search"], *times, f"{row['memory']:.3f}"])
        threads = f"{network['threads']} thread{'s' * (network['threads'] > 1)}, {network['repeats']} steps each"
        head = ("search", "ms per sample", "time", "its quartiles", "memory")
        found.append(results.Sheet(head, lines, f"{title} ({threads}; time and memory of the plain loop are 1)"))
    if row := content.get("curvature"):
        ranks = " to ".join(f"{value:.2f}" for value in (min(row["spearman"]), max(row["spearman"])))
        lines = [
            ["part of the epoch that it closes", f"{row['part_of_epoch']:.1%}"],
            ["memory, of a training step's", f"{row['memory']:.2f}"],
            [f"Spearman with the full ranking, of {row['samples']} images", ranks],
            ["the same of two halves of all images", f"{row['spearman_of_halves']:.2f}"],
            ["the same of the paper's estimate", f"{row['spearman_paper']:.2f}"],
            ["size of the paper's estimate", f"{row['ratio_paper']:.3f}"],
        ]
        found.append(results.Sheet(("curvature of bayesnas, trained ResNet-20", "measured"), lines))
    return found


if __name__ == "__main__":
    main()
