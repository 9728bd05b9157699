"""Is the architecture all that a search finds? The compact network against the same one trained from scratch.

    python -m benchmarks.vs_scratch [--quick] [--data FOLDER] [--seeds 3] [--workers 2]

CIFAR-10 ResNet-20, half of the multiply-adds left, netslim: 200 batches of search and 300 of fine-tuning, with the
dense network as teacher. `scratch`: the widths it found, fresh weights, trained for the same 500 batches with the same
teacher and three learning rates, the best of which counts; `longer` for four times as many. The pruned one inherits
what the dense one had learned before, and these do not: that is what pruning is for.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from rich.table import Table
from torch import nn

import compress
from compress.display import Display
from compress.engine import Engine
from compress.finetune import finetune
from compress.plan import Plan
from compress.recipe import Finetune
from compress.task import Classification

from . import methods, results
from .cifar import loaders
from .models import CifarResNet, cifar_resnet

SEARCH, TUNE, LONGER = 200, 300, 4
TEACHER = {"temperature": 4, "weight": 8}
RATES = (0.02, 0.05, 0.1)
JOBS = ("pruned", *(f"scratch, lr {rate}" for rate in RATES), f"longer, lr {RATES[1]}")


def one(job: methods.Job) -> methods.Row:
    name, seed, options = job
    torch.set_num_threads(1)
    scale = 10 if options.quick else 1
    train, val = loaders(options.data, options.validate)
    dense = cifar_resnet("resnet20", options.data).to(memory_format=torch.channels_last)
    recipe: dict[str, Any] = {
        "budget": {"macs": "50%"},
        "search": {"method": "netslim", "lr": 0.02, "epochs": f"{SEARCH // scale} steps", "distill": TEACHER},
        "timing": {"repeats": 3},
        "seed": seed,
    }
    if name == "pruned":
        tune = {"epochs": f"{TUNE // scale} steps", "lr": 0.01, "distill": TEACHER, "best": False}
        done = compress.prune(dense, recipe | {"finetune": tune}, train=train, val=val, device="cpu", quiet=True)
        accuracy = done.report.pruned.metrics["accuracy"]
    else:
        plan = compress.prune(dense, recipe, train=train, val=val, device="cpu", quiet=True).plan
        steps = (SEARCH + TUNE) // scale * (LONGER if name.startswith("longer") else 1)
        accuracy = _scratch(dense, plan, float(name.split("lr ")[1]), steps, seed, train, val)
    return {"method": name, "seed": seed, "accuracy": accuracy}


def _scratch(dense: nn.Module, plan: Plan, lr: float, steps: int, seed: int, train: Any, val: Any) -> float:
    torch.manual_seed(seed)
    fresh = CifarResNet(20).to(memory_format=torch.channels_last)
    student = plan.apply_(copy.deepcopy(fresh))
    for module in student.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    config = Finetune.model_validate(
        {"epochs": f"{steps} steps", "lr": lr, "warmup": "5%", "distill": TEACHER, "best": False}
    )
    engine, task = Engine(torch.device("cpu"), seed, Display(quiet=True)), Classification(train, val)
    finetune(student, dense.eval(), plan, task, train, config, engine, steps)
    return engine.evaluate(task, student)["accuracy"]


def main() -> None:
    parser = methods.options_of(__doc__, workers=2)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.seeds = 1 if options.quick else options.seeds
    file = "vs_scratch_quick" if options.quick else "vs_scratch"
    rows: list[dict[str, Any]] = results.load(file).get("rows", [])
    for row in methods.rows_of(one, JOBS[:2] if options.quick else JOBS, options, list(rows)):
        rows.append(row)
        print(row, flush=True)
        results.save(file, {"search_batches": SEARCH, "finetune_batches": TUNE, "longer": LONGER, "rows": rows})
    table, lines = Table("network", "accuracy", "seeds"), []
    for name in JOBS:
        if mine := [row["accuracy"] for row in rows if row["method"] == name]:
            lines.append([name, methods.percents(mine), str(len(mine))])
            table.add_row(*lines[-1])
    results.console().print(table)
    results.markdown(file, ("network", "accuracy", "seeds"), lines)


if __name__ == "__main__":
    main()
