"""Pruned network compared with the same architecture trained from scratch.

    python -m benchmarks.vs_scratch [--quick] [--data FOLDER] [--seeds 3] [--workers 2]

CIFAR-10 ResNet-20, half of the MACs left, netslim as in `benchmarks.accuracy`: search and fine-tuning with the dense
network as teacher. `scratch`: the widths that the search found, random weights, trained for as many batches as search
and fine-tuning together, with the same teacher, at three learning rates. `longer`: four times as many batches at the
middle learning rate. The pruned network starts from the weights of the trained dense network; the others do not.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import torch
from torch import nn

from . import methods, results
from .accuracy import STEPS, WITH_TEACHER, Bench, prune_with_ours
from .models import CifarResNet

LEFT, LONGER_FACTOR = 0.5, 4
SCRATCH_LRS = (0.02, 0.05, 0.1)
COLUMNS = ("network", "learning rate", "batches", "accuracy, %", "seeds")


def run_trial(trial: methods.Trial) -> methods.TrialRow:
    """Search once; train the pruned network and all networks from scratch at the widths it found."""
    name, seed, options = trial
    bench = Bench("resnet20", seed, options)
    divisor = bench.step_divisor
    compact, plan, cost = prune_with_ours("netslim", bench, LEFT, WITH_TEACHER)
    finetune_steps = STEPS // divisor - cost.batches
    bench.fine_tune_(compact, plan, finetune_steps, WITH_TEACHER)
    measurements = [
        {
            "network": "pruned",
            "lr": WITH_TEACHER["lr"],
            "batches": STEPS // divisor,
            "accuracy": bench.accuracy(compact),
        }
    ]
    scratch_runs = [("scratch", lr, STEPS // divisor) for lr in SCRATCH_LRS]
    for label, lr, steps in [*scratch_runs, ("longer", SCRATCH_LRS[1], LONGER_FACTOR * STEPS // divisor)]:
        torch.manual_seed(seed)
        scratch = plan.apply_(CifarResNet(20).to(memory_format=torch.channels_last))
        _reinitialize_(scratch)
        bench.fine_tune_(scratch, plan, steps, WITH_TEACHER | {"lr": lr, "warmup": "5%"})
        measurements.append({"network": label, "lr": lr, "batches": steps, "accuracy": bench.accuracy(scratch)})
    return {"method": name, "seed": seed, "found": measurements}


def _reinitialize_(model: nn.Module) -> None:
    """Reinitialize the layers at their current widths, because initial weights depend on the width."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear, nn.BatchNorm2d)):
            module.reset_parameters()


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the table of accuracies, best first."""
    accuracies: dict[tuple[str, float, int], list[float]] = {}
    for row in content["rows"]:
        for measurement in row["found"]:
            accuracies.setdefault((measurement["network"], measurement["lr"], measurement["batches"]), []).append(
                measurement["accuracy"]
            )
    ordered = sorted(accuracies.items(), key=lambda cell: -mean(cell[1]))
    lines = [[n, f"{lr}", f"{b}", methods.format_percent(v), str(len(v))] for (n, lr, b), v in ordered]
    return [results.ResultTable(COLUMNS, lines, "ResNet-20, 50% of the MACs left, the dense network as teacher")]


def main() -> None:
    parser = methods.make_parser(__doc__, workers=2)
    parser.add_argument("--quick", action="store_true", help="one seed, a quarter of the steps")
    options = parser.parse_args()
    options.seeds = 1 if options.quick else options.seeds
    file = results.result_name("vs_scratch", options.quick)
    rows: list[dict[str, Any]] = [] if options.quick else results.load(file).get("rows", [])
    for row in methods.run_missing_trials(run_trial, ["resnet20 50%"], options, list(rows)):
        rows.append(row)
        print(row, flush=True)
        results.save(file, {"batches": STEPS, "longer": LONGER_FACTOR, "rows": rows})
    results.publish(file, tables({"rows": rows}))


if __name__ == "__main__":
    main()
