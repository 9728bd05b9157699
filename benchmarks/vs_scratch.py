"""Is the architecture all that a search finds? The compact network against the same one trained from scratch.

    python -m benchmarks.vs_scratch [--quick] [--data FOLDER] [--seeds 3] [--workers 2]

CIFAR-10 ResNet-20, half of the multiply-adds left, netslim as in `benchmarks.accuracy`: search and fine-tuning, with
the dense network as teacher. `scratch`: the widths it found, fresh weights, trained for as many batches as search and
fine-tuning together, with the same teacher, at three learning rates; `longer`: four times as many at the middle rate.
The pruned one inherits what the dense one had learned before, and these do not: that is what pruning is for.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import torch
from torch import nn

from . import methods, results
from .accuracy import STEPS, TAUGHT, Bench, ours
from .models import CifarResNet

LEFT, LONGER = 0.5, 4
RATES = (0.02, 0.05, 0.1)
COLUMNS = ("network", "learning rate", "batches", "accuracy, %", "seeds")


def one(job: methods.Job) -> methods.Row:
    """All networks of a seed: they share the widths that its search finds."""
    name, seed, options = job
    bench = Bench("resnet20", seed, options)
    scale = bench.scale
    small, plan, spent = ours("netslim", bench, LEFT, TAUGHT)
    rest = STEPS // scale - spent["batches"]
    bench.tune(small, plan, rest, TAUGHT)
    found = [{"network": "pruned", "lr": TAUGHT["lr"], "batches": STEPS // scale, "accuracy": bench.accuracy(small)}]
    lengths = [("scratch", rate, STEPS // scale) for rate in RATES]
    for kind, rate, steps in [*lengths, ("longer", RATES[1], LONGER * STEPS // scale)]:
        torch.manual_seed(seed)
        fresh = plan.apply_(CifarResNet(20).to(memory_format=torch.channels_last))
        _forget(fresh)
        bench.tune(fresh, plan, steps, TAUGHT | {"lr": rate, "warmup": "5%"})
        found.append({"network": kind, "lr": rate, "batches": steps, "accuracy": bench.accuracy(fresh)})
    return {"method": name, "seed": seed, "found": found}


def _forget(model: nn.Module) -> None:
    """Draw every weight anew at the width it has now: cut out of a wider layer, it would be too small."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear, nn.BatchNorm2d)):
            module.reset_parameters()


def sheets(content: dict[str, Any]) -> list[results.Sheet]:
    cells: dict[tuple[str, float, int], list[float]] = {}
    for row in content["rows"]:
        for found in row["found"]:
            cells.setdefault((found["network"], found["lr"], found["batches"]), []).append(found["accuracy"])
    ranked = sorted(cells.items(), key=lambda cell: -mean(cell[1]))
    lines = [[n, f"{lr}", f"{b}", methods.percents(v), str(len(v))] for (n, lr, b), v in ranked]
    return [results.Sheet(COLUMNS, lines, "ResNet-20, 50% of the MACs left, the dense network teaches")]


def main() -> None:
    parser = methods.options_of(__doc__, workers=2)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.seeds = 1 if options.quick else options.seeds
    file = results.named("vs_scratch", options.quick)
    rows: list[dict[str, Any]] = [] if options.quick else results.load(file).get("rows", [])
    for row in methods.rows_of(one, ["resnet20 50%"], options, list(rows)):
        rows.append(row)
        print(row, flush=True)
        results.save(file, {"batches": STEPS, "longer": LONGER, "rows": rows})
    results.show(file, sheets({"rows": rows}))


if __name__ == "__main__":
    main()
