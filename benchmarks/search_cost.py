"""Cost of a search: time per training sample and peak memory relative to a plain training loop.

    python -m benchmarks.search_cost [--quick] [--repeats 15] [--threads 1] [--network vit_s] [--only curvature]

CIFAR ResNet-20 with batches of 128, a small ViT, and ViT-S with scores on the dimensions of attention and MLPs (only a
few searches, because its steps are slow). With `--network`, the saved results of the other networks are kept. The plain
loop is written directly in PyTorch. Times are medians over steps of all searches in alternation; a step that reads two
batches counts as two. Memory is the peak of torch's CPU allocator, including weights, gradients and optimizer state.
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
from compress.budget import PruningSchedule
from compress.graph import Groups
from compress.modules import shared_copy
from compress.progress import ProgressDisplay
from compress.recipe import Recipe, Target
from compress.search import Job, search_class
from compress.search.bayes.curvature import Curvature, CurvatureKind
from compress.search.bayes.outer_iterations import SAMPLE_FRACTION
from compress.surgery import attach_

from . import data, results
from .models import CifarResNet, load_cifar_resnet

EPOCH_IMAGES = 50000  # images, of CIFAR-10
FIXED_GAMMA = {"gamma": 1e-4}
SEARCHES: dict[str, dict[str, Any]] = {
    "netslim": {"method": "netslim", **FIXED_GAMMA},
    "netslim auto": {"method": "netslim"},
    "rarts exact": {"method": "rarts", **FIXED_GAMMA},
    "rarts fused": {"method": "rarts", "update": "fused", **FIXED_GAMMA},
    "rarts fused auto": {"method": "rarts", "update": "fused"},
    "darts1": {"method": "darts1", **FIXED_GAMMA},
    "darts2": {"method": "darts2", **FIXED_GAMMA},
    "milenas": {"method": "milenas", **FIXED_GAMMA},
    "bayesnas": {"method": "bayesnas", "gamma": 1e-2},
    "bayesnas auto": {"method": "bayesnas"},
    "aps ordinal, first stage": {"method": "aps", "sharing": "ordinal", "first_stage": 0.89},
    "aps ordinal": {"method": "aps", "sharing": "ordinal", "first_stage": 0},
    "aps independent": {"method": "aps", "sharing": "independent", "first_stage": 0},
    "aps transitionary": {"method": "aps", "sharing": "transitionary", "first_stage": 0},
}
QUICK_SEARCHES = ("netslim", "netslim auto", "rarts fused")
Step = Callable[[], int]  # makes one step and returns the number of batches it read


@dataclass(frozen=True)
class Network:
    """Network to measure: batch size, image size, scored dimensions, searches, and goals (time, memory) by search."""

    title: str
    make: Callable[[], nn.Module]
    batch: int
    size: int = 32
    target: dict[str, Any] = field(default_factory=dict)
    searches: tuple[str, ...] = tuple(SEARCHES)
    goals: dict[str, tuple[float, float | None]] = field(default_factory=dict)


def vit(size: int, patch: int, width: int, depth: int, heads: int) -> nn.Module:
    """Return an untrained ViT with 10 classes."""
    shape = {"img_size": size, "patch_size": patch, "embed_dim": width, "depth": depth, "num_heads": heads}
    return timm.models.VisionTransformer(**shape, num_classes=10)


NETWORKS = {
    "resnet20": Network(
        "resnet20, batch 128",
        lambda: CifarResNet(20),
        128,
        goals={"netslim": (1.05, 1.02), "rarts exact": (1.75, None), "rarts fused": (1.10, None)},
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


def make_plain_step(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Return a step of a plain PyTorch training loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)

    def step() -> int:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return 1

    return step


def make_search_step(
    name: str, target: dict[str, Any], model: nn.Module, groups: Groups, x: Tensor, y: Tensor, **settings: Any
) -> Step:
    """Return a step of a search."""
    search = {**SEARCHES[name], "epochs": "1000 steps", **settings}
    recipe = Recipe.load({"target": target, "budget": {"macs": "50%"}, "search": search})
    limits = {"macs": 0.5 * float(groups.cost.macs(groups.cost.widths))}
    display = ProgressDisplay(quiet=True)
    schedule = PruningSchedule(recipe, groups, shared_copy(model), model, x, None, 0, display, limits=limits)
    job = Job(model, groups, compress.Classification(), 1000, schedule=schedule)
    searcher = search_class(recipe.search.method)(recipe.search, job)
    batch: Any = (x, y) if searcher.batches_per_step == 1 else ((x, y), (x.clone(), y.clone()))

    def step() -> int:
        searcher.step(batch)
        return searcher.batches_per_step

    return step


def peak_memory(make_step: Callable[[], Step]) -> int:
    """Return the peak bytes while `make_step` builds a step and the step runs three times."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = make_step()
        for _ in range(3):
            step()
    allocations = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return int(np.cumsum(allocations).max())


def measure(network: Network, repeats: int) -> list[dict[str, Any]]:
    """Measure time and memory of all searches and the plain loop on one network."""
    torch.manual_seed(0)
    model, x = network.make(), torch.randn(network.batch, 3, network.size, network.size)
    y = torch.randint(0, 10, (len(x),))
    groups = compress.find_groups(model.eval(), x[:1], Target(**network.target))
    model.train()

    def make_step(name: str) -> Step:
        copied = copy.deepcopy(model)
        return (
            make_plain_step(copied, x, y)
            if name == "plain loop"
            else make_search_step(name, network.target, copied, groups, x, y)
        )

    names = ["plain loop", *network.searches]
    memory = {name: peak_memory(lambda name=name: make_step(name)) for name in names}  # type: ignore[misc]
    steps = {name: make_step(name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            batches = step()
            if repeat >= 2:
                seconds[name].append((time.perf_counter() - start) / batches)
    rows = []
    for name in names:
        ratios = np.array(seconds[name]) / np.array(seconds["plain loop"])
        low, high = np.percentile(ratios, [25, 75])
        rows.append(
            {
                "search": name,
                "ms_per_sample": 1e3 * median(seconds[name]) / len(x),
                "time": float(np.median(ratios)),
                "time_quartiles": [float(low), float(high)],
                "memory": memory[name] / memory["plain loop"],
                "peak_mb": memory[name] / 2**20,
            }
        )
    return rows


def measure_curvature(repeats: int, folder: Path) -> dict[str, Any]:
    """Measure the time of bayesnas's curvature relative to an epoch, and how well a subsample ranks the dimensions.

    On a trained ResNet-20 and real images. The full ranking uses all 8192 images; the subsample is as large
    as in a search: 5 % of an epoch of 50000.
    """
    model = load_cifar_resnet("resnet20", folder)
    x, y = data.load_cifar10(folder, "train", 8192)
    groups = compress.find_groups(model.eval(), x[:1])
    scores, task = attach_(model, groups), compress.Classification()

    def estimate(index: Tensor, kind: CurvatureKind = "auto") -> tuple[Tensor, float]:
        curvature, start = Curvature(model, groups, scores, kind), time.perf_counter()
        curvature.add_(task, (x[index], y[index]), len(index))
        return torch.cat(list(curvature.mean()[0].values())), time.perf_counter() - start

    torch.manual_seed(0)
    count = round(SAMPLE_FRACTION * EPOCH_IMAGES)
    full_ranking = estimate(torch.arange(len(x)))[0]
    half_rankings = [estimate(indices)[0] for indices in torch.randperm(len(x)).chunk(2)]
    subsampled = [estimate(torch.randperm(len(x))[:count]) for _ in range(3)]
    paper_estimate = estimate(torch.randperm(len(x))[:count], "paper")[0]

    def make_training_step() -> Step:
        return make_plain_step(load_cifar_resnet("resnet20", folder).train(), x[:128], y[:128])

    def make_curvature_step() -> Step:
        curvature = Curvature(model, groups, scores, "auto")

        def step() -> int:
            curvature.add_(task, (x[:128], y[:128]), 32)
            return 1

        return step

    step, fractions = make_training_step(), []
    for repeat in range(repeats + 2):  # alternately, because other load on the machine varies
        start = time.perf_counter()
        step()
        step_seconds = time.perf_counter() - start
        curvature_seconds = estimate(torch.arange(128))[1]
        if repeat >= 2:
            fractions.append(curvature_seconds * count / (step_seconds * EPOCH_IMAGES))
    return {
        "samples": count,
        "spearman": [spearman(v, full_ranking) for v, _ in subsampled],
        "spearman_of_halves": spearman(*half_rankings),
        "spearman_paper": spearman(paper_estimate, full_ranking),
        "ratio_paper": float((paper_estimate / full_ranking.clamp_min(1e-30)).median()),
        "part_of_epoch": median(fractions),
        "memory": peak_memory(make_curvature_step) / peak_memory(make_training_step),
    }


def spearman(a: Tensor, b: Tensor) -> float:
    """Return the Spearman rank correlation."""
    ranks = torch.stack([v.argsort().argsort().double() for v in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def main() -> None:
    parser = results.make_parser(__doc__, data=True)
    parser.add_argument("--repeats", type=int, default=15, help="timed steps per search")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["curvature", "searches"], default=None)
    parser.add_argument(
        "--network", choices=[*NETWORKS], action="append", help="measure only this network; can be repeated"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    file = results.result_name("search_cost", options.quick)
    if options.quick:
        options.network, options.repeats = ["resnet20"], 3
    if options.only != "searches" and not options.network:
        row = measure_curvature(options.repeats, options.data)
        print("curvature of the scores:", row, flush=True)
        results.save(file, results.load(file) | {"curvature": row})
    if options.only == "curvature":
        return
    networks: dict[str, Any] = results.load(file).get("networks", {})
    for name in options.network or NETWORKS:
        network = NETWORKS[name]
        network = replace(network, searches=QUICK_SEARCHES) if options.quick else network
        rows = measure(network, options.repeats)
        networks[network.title] = {"threads": options.threads, "repeats": options.repeats, "rows": rows}
        results.save(file, results.load(file) | {"networks": networks, "seed": 0})
        print(f"{network.title} done", flush=True)
    results.publish(file, tables(results.load(file)))


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return one table per network, and one for the curvature."""
    all_tables = []
    for title, network in content["networks"].items():
        lines = []
        for row in network["rows"]:
            low, high = row["time_quartiles"]
            times = [f"{row['ms_per_sample']:.2f}", f"{row['time']:.3f}", f"{low:.3f} to {high:.3f}"]
            lines.append([row["search"], *times, f"{row['memory']:.3f}"])
        threads = f"{network['threads']} thread{'s' * (network['threads'] > 1)}, {network['repeats']} steps each"
        head = ("search", "ms per sample", "time", "time, quartiles", "memory")
        all_tables.append(
            results.ResultTable(head, lines, f"{title} ({threads}; time and memory relative to the plain loop)")
        )
    if row := content.get("curvature"):
        ranks = " to ".join(f"{value:.2f}" for value in (min(row["spearman"]), max(row["spearman"])))
        lines = [
            ["time relative to an epoch", f"{row['part_of_epoch']:.1%}"],
            ["memory relative to a training step", f"{row['memory']:.2f}"],
            [f"Spearman correlation with the full ranking, {row['samples']} images", ranks],
            ["Spearman correlation of the rankings of two halves", f"{row['spearman_of_halves']:.2f}"],
            ["Spearman correlation of the paper's estimate with the full ranking", f"{row['spearman_paper']:.2f}"],
            ["median ratio of the paper's estimate to the full one", f"{row['ratio_paper']:.3f}"],
        ]
        all_tables.append(results.ResultTable(("curvature of bayesnas, trained ResNet-20", "measured"), lines))
    return all_tables


if __name__ == "__main__":
    main()
