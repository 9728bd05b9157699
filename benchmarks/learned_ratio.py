"""MobileNetV2 with a learned pruning ratio on few images, compared with table 4.2 of the thesis.

    python -m benchmarks.learned_ratio [--quick] [--data FOLDER] [--seeds 5]

F. Xue, Relaxation and Optimization for Automated Learning of Neural Network Architectures, 2022, section 4.2.2. The
thesis prunes MobileNetV2 on 26000 images of 20 classes of ImageNet. Here it is a narrow MobileNetV2 on CIFAR-10. There
is no budget: l1 on the scores, applied by soft thresholding, decides how much is pruned; its strength was chosen for
each search on seed 0, so that the PRC is about that of the thesis. `random` prunes the PRC of `rarts` with the same
seed, at random. `dense` is not pruned. Every seed trains a network of its own, and from it all methods read the same
number of batches: those that do not search fine-tune longer. PRC is the part of the channels that is pruned, averaged
over the pruned layers.

Trials are saved one by one: a run that is stopped continues where it was.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import MobileNetV2

import compress

from . import data, methods, results

WIDTHS = [
    [1, 8, 1, 1],
    [4, 12, 2, 1],
    [4, 16, 2, 2],
    [4, 32, 2, 2],
    [4, 48, 2, 1],
]  # expansion, channels, blocks, stride
IMAGES, TEST_IMAGES, BATCH = 5000, 2000, 64
DENSE_STEPS, SEARCH_BATCHES, FINETUNE_STEPS = 400, 240, 240
LR, SEARCH_LR, WEIGHT_DECAY = 0.1, 0.05, 4e-5
GAMMA = {"rarts": 4e-2, "darts1": 2.6e-2, "darts2": 2.9e-2}  # chosen on seed 0, for a PRC of about 70 %
QUICK_STEPS, QUICK_GAMMA = 5, 5.0  # so strong that scores reach zero in so few steps
PAIRED = tuple(GAMMA)  # searches that read two batches in a step
METHODS = ("dense", "rarts", "random", "darts1", "darts2")
THESIS = {  # table 4.2: test error and PRC in percent
    "dense": ("12.3 ± 1.4", "-"),
    "random": ("12.0 ± 1.1", "71.2 ± 1.9"),
    "darts1": ("10.1 ± 2.0", "69.0 ± 0.9"),
    "darts2": ("9.8 ± 1.7", "72.6 ± 2.0"),
    "rarts": ("8.2 ± 1.9", "71.2 ± 1.9"),
}


def small_mobilenet() -> MobileNetV2:
    """Return a narrow MobileNetV2 for images of 32 x 32 pixels."""
    model = MobileNetV2(10, inverted_residual_setting=WIDTHS, round_nearest=4, dropout=0.0)
    last = model.features[-1]
    model.features[-1] = nn.Sequential(
        nn.Conv2d(last[0].in_channels, 128, 1, bias=False), nn.BatchNorm2d(128), nn.ReLU6(inplace=True)
    )
    model.classifier = nn.Sequential(nn.Linear(128, 10))
    return model


class Bench:
    """Data, and the trained network of a seed; a tenth of the images and few steps if `quick`."""

    def __init__(self, folder: Path, seed: int, quick: bool) -> None:
        self.seed, self.quick, divisor = seed, quick, 10 if quick else 1
        train = data.CropFlipDataset(*data.load_cifar10(folder, "train", IMAGES // divisor))
        test = TensorDataset(*data.load_cifar10(folder, "test", TEST_IMAGES // divisor))
        self.train, self.test = DataLoader(train, BATCH, shuffle=True, drop_last=True), DataLoader(test, 500)

    @functools.cached_property
    def network(self) -> MobileNetV2:
        """A network trained from random weights."""
        torch.manual_seed(self.seed)
        model, steps = small_mobilenet().train(), QUICK_STEPS if self.quick else DENSE_STEPS
        model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9, nesterov=True, weight_decay=WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        stream = (batch for _ in range(steps) for batch in self.train)
        for _, (x, y) in zip(range(steps), stream, strict=False):
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y).backward()
            optimizer.step()
            schedule.step()
        return model.eval()


def recipe(method: str, seed: int, quick: bool, kept: float = 1.0) -> dict[str, Any]:
    """Return the recipe of a trial; `kept` is the part of the dimensions that `random` keeps."""
    finetune = FINETUNE_STEPS if method in PAIRED else FINETUNE_STEPS + SEARCH_BATCHES
    settings = {"lr": SEARCH_LR, "weight_decay": WEIGHT_DECAY, "decay_norms": True, "distill": None}
    search: dict[str, Any] = {"method": "random"}
    if method in PAIRED:
        steps = QUICK_STEPS if quick else SEARCH_BATCHES // 2
        search = {"method": method, "epochs": f"{steps} steps", "alpha": {"schedule": "constant"}, **settings}
        search |= {"gamma": QUICK_GAMMA if quick else GAMMA[method], "proximal": True}
    return {
        "target": {"channels": True, "round_to": 1},
        "budget": "auto" if method in PAIRED else {"dims": kept},
        "search": search,
        "finetune": {"epochs": f"{QUICK_STEPS if quick else finetune} steps", "best": False, **settings},
        "timing": {"repeats": 3},
        "seed": seed,
    }


def run_trial(bench: Bench, method: str, kept: float) -> dict[str, Any]:
    """Prune and fine-tune with one method; `dense` is trained for as many batches without pruning."""
    settings = recipe(method, bench.seed, bench.quick, kept)
    start = time.process_time()
    report = compress.prune(bench.network, settings, train=bench.train, val=bench.test, device="cpu", quiet=True).report
    widths = [(row.kept, row.width) for row in report.groups]
    return {
        "method": method,
        "seed": bench.seed,
        "error": 1 - report.pruned.metrics["accuracy"],
        "error_before": 1 - report.dense.metrics["accuracy"],
        "error_sliced": 1 - report.sliced["accuracy"],
        "prc": mean(1 - left / width for left, width in widths),
        "kept": sum(left for left, _ in widths) / sum(width for _, width in widths),
        "macs": report.pruned.macs / report.dense.macs,
        "params": report.pruned.params / report.dense.params,
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def main() -> None:
    parser = results.make_parser(__doc__, data=True)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = results.result_name("learned_ratio", options.quick)
    rows: list[dict[str, Any]] = [] if options.quick else results.load(file).get("rows", [])
    settings = {"gamma": GAMMA, "dense_steps": DENSE_STEPS, "search": SEARCH_BATCHES, "finetune": FINETUNE_STEPS}
    for seed in range(1 if options.quick else options.seeds):
        bench, known = (
            Bench(options.data, seed, options.quick),
            {row["method"]: row for row in rows if row["seed"] == seed},
        )
        for method in [method for method in METHODS if method not in known]:
            kept = 1 - known["rarts"]["prc"] if method == "random" else 1.0
            known[method] = run_trial(bench, method, kept)
            rows.append(known[method])
            print(known[method], flush=True)
            results.save(file, settings | {"rows": rows})
    results.publish(file, tables({"rows": rows}))


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the table of all methods, beside that of the thesis."""
    lines = []
    for name in METHODS:
        rows = [row for row in content["rows"] if row["method"] == name]
        if not rows:
            continue
        percents = [
            methods.format_percent([row[key] for row in rows]) for key in ("error", "error_sliced", "prc", "macs")
        ]
        before = methods.format_percent([row["error_before"] for row in rows])
        cut = percents[1:] if name != "dense" else ["-"] * 3
        lines.append([name, percents[0], *cut, before, *THESIS[name], str(len(rows))])
    head = ("method", "error, %", "right after the cut, %", "PRC, %", "MACs left, %", "before, %")
    return [results.ResultTable((*head, "thesis: error, %", "thesis: PRC, %", "seeds"), lines)]


if __name__ == "__main__":
    main()
