"""How dimensions of different groups are compared: which ranking serves which scores best.

    python -m benchmarks.ranking [--quick] [--data FOLDER] [--seeds 3] [--search 300] [--finetune 200]

CIFAR-10 ResNet-20, half of the MACs left. Each method finds its scores once per seed; every ranking
cuts by the same scores, and every compact network is fine-tuned alike with the dense one as its teacher.
"""

from __future__ import annotations

import argparse
import copy
from itertools import product
from typing import Any

import torch
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

from . import data, methods, results
from .models import cifar_resnet

RANKINGS = ("global", "group", "cost", "lamp")
METHODS: dict[str, dict[str, Any]] = {
    "random": {"method": "random"},
    "magnitude": {"method": "magnitude"},
    "taylor": {"method": "taylor"},
    "netslim": {"method": "netslim", "epochs": 1, "lr": 0.02, "gamma": 1e-4},
}
QUICK = ("magnitude", "taylor")
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
        steps = (
            0
            if recipe.search.length is None
            else options.search
            if method["method"] == "netslim"
            else min(50, options.search)
        )
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
    parser = results.options_of(__doc__, data=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--search", type=int, default=300)
    parser.add_argument("--finetune", type=int, default=200)
    options = parser.parse_args()
    chosen, cuts, images, count = METHODS, TARGETS, 20000, 5000
    if options.quick:
        options.seeds, options.search, options.finetune, images, count = 1, 4, 4, 1000, 500
        chosen, cuts = ({k: some[k] for k in names} for some, names in ((METHODS, QUICK), (TARGETS, ["channels"])))
    file = results.named("ranking", options.quick)
    train = DataLoader(data.Flipped(*data.cifar10(options.data, "train", images)), 128, shuffle=True, drop_last=True)
    val = DataLoader(TensorDataset(*data.cifar10(options.data, "test", count)), 500)
    task = compress.Classification(train, val)
    rows = []
    for seed in range(options.seeds):
        for name, method in chosen.items():
            for cut, target in cuts.items():
                for row in one(method, target, seed, options, task):
                    rows.append({"method": name, "cut": cut, "seed": seed, **row})
                    print(rows[-1], flush=True)
            results.save(file, {"search_steps": options.search, "finetune_steps": options.finetune, "rows": rows})
    results.show(file, sheets({"rows": rows}))


def sheets(content: dict[str, Any]) -> list[results.Sheet]:
    lines = []
    for name, cut, ranking in product(METHODS, TARGETS, RANKINGS):
        mine = [r for r in content["rows"] if (r["method"], r["cut"], r["ranking"]) == (name, cut, ranking)]
        if mine:
            measured = [methods.percents([r[key] for r in mine]) for key in ("sliced", "tuned")]
            narrowest = f"{min(r['narrowest'] for r in mine):.0%}"
            lines.append([name, cut, ranking, *measured, narrowest, str(len(mine))])
    head = ("method", "cut", "ranking", "right after the cut, %", "fine-tuned, %", "narrowest group", "seeds")
    return [results.Sheet(head, lines)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
