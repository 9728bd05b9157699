"""Rankings of dimensions across groups: which one works best for which scores.

    python -m benchmarks.ranking [--quick] [--data FOLDER] [--seeds 3] [--search 300] [--finetune 200]

CIFAR-10 ResNet-20, half of the MACs left. Each method computes its scores once per seed. Every ranking cuts by the same
scores, and every compact network is fine-tuned in the same way with the dense network as teacher.
"""

from __future__ import annotations

import argparse
import copy
from itertools import product
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.budget import choose_widths
from compress.progress import ProgressDisplay
from compress.recipe import Recipe
from compress.search import Job, search_class
from compress.storage import TrainingState, seed_all
from compress.surgery import fold_, slice_
from compress.training import Engine, FineTuneJob, fine_tune

from . import data, methods, results
from .models import load_cifar_resnet

RANKINGS = ("global", "group", "cost", "lamp")
METHODS: dict[str, dict[str, Any]] = {
    "random": {"method": "random"},
    "magnitude": {"method": "magnitude"},
    "taylor": {"method": "taylor"},
    "netslim": {"method": "netslim", "epochs": 1, "lr": 0.02, "gamma": 1e-4},
}
QUICK_METHODS = ("magnitude", "taylor")
TARGETS = {"channels": {}, "channels + residual": {"residual": True}}


def compare_rankings(
    method: dict[str, Any],
    target: dict[str, Any],
    seed: int,
    options: argparse.Namespace,
    task: compress.Classification,
) -> list[dict[str, Any]]:
    """Search once; prune and fine-tune a compact network for each ranking of the scores."""
    recipe = Recipe.load(
        {
            "budget": {"macs": "50%"},
            "search": method,
            "target": target | {"round_to": 1},
            "finetune": {"epochs": f"{options.finetune} steps", "lr": 0.02, "distill": {}, "best": False},
            "seed": seed,
        }
    )
    dense = load_cifar_resnet("resnet20", options.data)
    with ProgressDisplay() as display:
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
            engine.train("search", task.train or (), steps, search.step, TrainingState({}))
        importance = search.importance()
        fold_(model).eval()
        rows = []
        for ranking in RANKINGS:
            keep = choose_widths(groups, importance, recipe.budget, recipe.target, ranking=ranking)
            plan = compress.Plan.build(model, groups, keep)
            compact = slice_(copy.deepcopy(model), plan)
            accuracy_after_cut = engine.evaluate(task, compact)["accuracy"]
            seed_all(seed)
            assert recipe.finetune is not None
            job = FineTuneJob(compact, dense, plan, recipe.finetune, engine, options.finetune)
            fine_tune(job, task, task.train or ())
            rows.append(
                {
                    "ranking": ranking,
                    "sliced": accuracy_after_cut,
                    "tuned": engine.evaluate(task, compact)["accuracy"],
                    "narrowest": min(
                        len(kept) / group.width for kept, group in zip(keep.values(), groups, strict=True)
                    ),
                }
            )
    return rows


def main() -> None:
    parser = results.make_parser(__doc__, data=True)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--search", type=int, default=300, help="search steps of netslim")
    parser.add_argument("--finetune", type=int, default=200, help="fine-tuning steps")
    options = parser.parse_args()
    chosen, targets, train_images, test_images = METHODS, TARGETS, 20000, 5000
    if options.quick:
        options.seeds, options.search, options.finetune, train_images, test_images = 1, 4, 4, 1000, 500
        chosen, targets = (
            {k: settings[k] for k in names} for settings, names in ((METHODS, QUICK_METHODS), (TARGETS, ["channels"]))
        )
    file = results.result_name("ranking", options.quick)
    train = DataLoader(
        data.CropFlipDataset(*data.load_cifar10(options.data, "train", train_images)), 128, shuffle=True, drop_last=True
    )
    val = DataLoader(TensorDataset(*data.load_cifar10(options.data, "test", test_images)), 500)
    task = compress.Classification(train, val)
    rows = []
    for seed in range(options.seeds):
        for name, method in chosen.items():
            for target_name, target in targets.items():
                for row in compare_rankings(method, target, seed, options, task):
                    rows.append({"method": name, "cut": target_name, "seed": seed, **row})
                    print(rows[-1], flush=True)
            results.save(file, {"search_steps": options.search, "finetune_steps": options.finetune, "rows": rows})
    results.publish(file, tables({"rows": rows}))


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the table of rankings by method and target."""
    lines = []
    for name, target_name, ranking in product(METHODS, TARGETS, RANKINGS):
        rows = [r for r in content["rows"] if (r["method"], r["cut"], r["ranking"]) == (name, target_name, ranking)]
        if rows:
            accuracies = [methods.format_percent([r[key] for r in rows]) for key in ("sliced", "tuned")]
            narrowest = f"{min(r['narrowest'] for r in rows):.0%}"
            lines.append([name, target_name, ranking, *accuracies, narrowest, str(len(rows))])
    head = ("method", "cut", "ranking", "right after the cut, %", "fine-tuned, %", "narrowest group", "seeds")
    return [results.ResultTable(head, lines)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
