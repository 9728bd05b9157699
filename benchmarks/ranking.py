"""How dimensions of different groups are compared: which ranking serves which scores best.

    python -m benchmarks.ranking [--data FOLDER] [--seeds 3] [--search 300] [--finetune 200]

CIFAR-10 ResNet-20, half of the MACs left. Each method finds its scores once per seed; every ranking
cuts by the same scores, and every compact network is fine-tuned alike with the dense one as its teacher.
"""

from __future__ import annotations

import argparse
import copy
from itertools import product
from statistics import mean, stdev
from typing import Any

import torch
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.budget import choose
from compress.checkpoint import seed_all
from compress.display import Display
from compress.engine import Engine
from compress.finetune import finetune
from compress.gates import fold_
from compress.recipe import Recipe
from compress.search import Job, search_class
from compress.slicing import slice_

from . import data, results
from .models import cifar_resnet

RANKINGS = ("global", "group", "cost")
METHODS: dict[str, dict[str, Any]] = {
    "random": {"method": "random"},
    "magnitude": {"method": "magnitude"},
    "taylor": {"method": "taylor"},
    "netslim": {"method": "netslim", "epochs": 1, "lr": 0.02, "gamma": 1e-4},
}
TARGETS = {"channels": {}, "channels + residual": {"residual": True}}


def one(
    method: dict[str, Any],
    target: dict[str, Any],
    seed: int,
    options: argparse.Namespace,
    task: compress.Classification,
) -> list[dict[str, Any]]:
    """A search, and a compact network for each ranking of its scores."""
    recipe = Recipe.load(
        {
            "budget": {"macs": "50%"},
            "search": method,
            "target": target,
            "finetune": {"epochs": f"{options.finetune} steps", "lr": 0.02, "distill": {}, "best": False},
            "seed": seed,
        }
    )
    dense = cifar_resnet("resnet20", options.data)
    with Display() as display:
        engine = Engine(torch.device("cpu"), seed, display)
        model = copy.deepcopy(dense)
        groups = compress.find_groups(model, torch.randn(1, 3, 32, 32), recipe.target)
        seed_all(seed)
        steps = 0 if recipe.search.length is None else options.search if method["method"] == "netslim" else 50
        search = search_class(recipe.search.method)(recipe.search, Job(model, groups, task, steps, seed))
        if steps:
            model.train(search.trains)
            engine.train("search", task.train or (), steps, search.step, compress.checkpoint.State({}))
        importance = search.importance()
        fold_(model).eval()
        rows = []
        for ranking in RANKINGS:
            keep = choose(groups, importance, recipe.budget, recipe.target, ranking=ranking)
            plan = compress.Plan.build(model, groups, keep)
            small = slice_(copy.deepcopy(model), plan)
            after = engine.evaluate(task, small)["accuracy"]
            seed_all(seed)
            assert recipe.finetune is not None
            finetune(small, dense, plan, task, task.train or (), recipe.finetune, engine, options.finetune)
            rows.append(
                {
                    "ranking": ranking,
                    "sliced": after,
                    "tuned": engine.evaluate(task, small)["accuracy"],
                    "narrowest": min(
                        len(kept) / group.width for kept, group in zip(keep.values(), groups, strict=True)
                    ),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data.add_option(parser)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--search", type=int, default=300)
    parser.add_argument("--finetune", type=int, default=200)
    options = parser.parse_args()
    train = DataLoader(data.Flipped(*data.cifar10(options.data, "train", 20000)), 128, shuffle=True, drop_last=True)
    val = DataLoader(TensorDataset(*data.cifar10(options.data, "test", 5000)), 500)
    task = compress.Classification(train, val)
    rows = []
    for seed in range(options.seeds):
        for name, method in METHODS.items():
            for cut, target in TARGETS.items():
                for row in one(method, target, seed, options, task):
                    rows.append({"method": name, "cut": cut, "seed": seed, **row})
                    print(rows[-1], flush=True)
            results.save("ranking", {"search_steps": options.search, "finetune_steps": options.finetune, "rows": rows})
    table = Table("method", "cut", "ranking", "right after the cut", "after fine-tuning", "narrowest group")
    for name, cut, ranking in product(METHODS, TARGETS, RANKINGS):
        mine = [r for r in rows if (r["method"], r["cut"], r["ranking"]) == (name, cut, ranking)]
        table.add_row(
            name,
            cut,
            ranking,
            *(
                f"{100 * mean(r[k] for r in mine):.1f} ± {_spread([r[k] for r in mine]):.1f}"
                for k in ("sliced", "tuned")
            ),
            f"{min(r['narrowest'] for r in mine):.0%}",
        )
    results.console().print(table)


def _spread(values: list[float]) -> float:
    return 100 * stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
