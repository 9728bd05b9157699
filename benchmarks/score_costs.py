"""Time of recording the costs of scores: steps of a search with `costs: true` relative to steps without.

    python -m benchmarks.score_costs [--quick] [--repeats 15] [--threads 1] [--network cells]

CIFAR ResNet-20 with batches of 128, and a small network of DARTS's space (3 cells, 8 channels, batches of 16). The two
searches of a pair make their steps in alternation. Times are those of the processor, on which other load has less
influence: the median of the ratios over the pairs of steps, and the ratio of the fastest steps. With `--network`, the
saved results of the other networks are kept.
"""

from __future__ import annotations

import copy
import time
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import compress
from compress.budget import Operations
from compress.cells import darts_network
from compress.graph import Groups
from compress.recipe import Recipe, Target
from compress.search import Job, search_class

from . import results
from .search_cost import NETWORKS, SEARCHES, Network, Step, make_search_step

COMPARED = {
    "resnet20": ("netslim", "rarts fused", "darts1"),
    "cells": ("rarts fused", "darts1"),
}
CELLS = Network("cells", lambda: darts_network(8, 3), 16)


def make_operation_step(name: str, model: nn.Module, x: Tensor, y: Tensor, costs: bool) -> Step:
    """Return a step of a search over operations."""
    settings = {key: value for key, value in SEARCHES[name].items() if key != "gamma"}
    search = {**settings, "epochs": "1000 steps", "costs": costs}
    recipe = Recipe.load({"target": {"operations": True}, "search": search})
    job = Job(
        model,
        Groups.empty(),
        compress.Classification(),
        1000,
        operations=Operations(model, x[:1], recipe.timing),
    )
    searcher = search_class(recipe.search.method, operations=True)(recipe.search, job)
    batch: Any = (x, y) if searcher.batches_per_step == 1 else ((x, y), (x.clone(), y.clone()))

    def step() -> int:
        searcher.step(batch)
        return searcher.batches_per_step

    return step


def measure(name: str, repeats: int, searches: tuple[str, ...]) -> list[dict[str, Any]]:
    """Measure the searches of one network."""
    torch.manual_seed(0)
    network = NETWORKS.get(name, CELLS)
    model, x = network.make(), torch.randn(network.batch, 3, network.size, network.size)
    y = torch.randint(0, 10, (len(x),))
    groups = None if network is CELLS else compress.find_groups(model.eval(), x[:1], Target(**network.target))
    model.train()

    def make_step(search: str, costs: bool) -> Step:
        copied = copy.deepcopy(model)
        if groups is None:
            return make_operation_step(search, copied, x, y, costs)
        return make_search_step(search, network.target, copied, groups, x, y, costs=costs)

    rows = []
    for search in searches:
        steps = [make_step(search, costs) for costs in (False, True)]
        seconds: list[list[float]] = [[], []]
        for repeat in range(repeats + 2):
            for i in (0, 1) if repeat % 2 else (1, 0):
                start = time.process_time()
                steps[i]()
                if repeat >= 2:
                    seconds[i].append(time.process_time() - start)
        ratios = np.array(seconds[1]) / np.array(seconds[0])
        low, high = np.percentile(ratios, [25, 75]).tolist()
        numbers = {"ms": 1e3 * median(seconds[0]), "time": float(np.median(ratios)), "time_quartiles": [low, high]}
        numbers["fastest"] = min(seconds[1]) / min(seconds[0])
        rows.append({"search": search, **numbers, "repeats": repeats})
        print(name, rows[-1], flush=True)
    return rows


def main() -> None:
    parser = results.make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="pairs of steps for each search")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--network", choices=[*COMPARED], action="append", help="measure only this network; can be repeated"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    file = results.result_name("score_costs", options.quick)
    networks: dict[str, Any] = results.load(file).get("networks", {})
    for name in ["cells"] if options.quick else options.network or COMPARED:
        searches = COMPARED[name][-1:] if options.quick else COMPARED[name]
        networks[name] = measure(name, 3 if options.quick else options.repeats, searches)
        results.save(file, {"networks": networks, "threads": options.threads, "seed": 0})
    results.publish(file, tables(results.load(file)))


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the table of all networks and searches."""
    lines = []
    for name, rows in content["networks"].items():
        for row in rows:
            low, high = row["time_quartiles"]
            numbers = [f"{row['ms']:.0f}", f"{row['time']:.3f}", f"{low:.3f} to {high:.3f}"]
            numbers += [f"{row['fastest']:.3f}", str(row["repeats"])]
            lines.append([name, row["search"], *numbers])
    head = (
        "network",
        "search",
        "ms per step, `costs: false`",
        "time, `costs: true`",
        "quartiles",
        "fastest steps",
        "pairs",
    )
    return [results.ResultTable(head, lines)]


if __name__ == "__main__":
    main()
