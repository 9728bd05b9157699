"""Run a function of this file in two processes, on gloo, and return what each of them reports.

Each process is `python -m helpers.two_processes FUNCTION FOLDER` and writes its report as JSON to the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import compress
from compress.data.sharding import shard_loader
from compress.distributed import (
    all_gather_object,
    all_reduce_mean,
    all_reduce_mean_,
    all_reduce_sum,
    broadcast_module_,
    broadcast_object,
    init_process_group,
    on_rank_zero,
    rank,
    world_size,
)
from compress.training.gradients import GradientComputer

TESTS = Path(__file__).parents[1]
TRAIN: dict[str, Any] = {"epochs": 2, "lr": 0.01, "clip": 1.0}
SEARCHES: list[dict[str, Any]] = [
    {"method": "netslim", **TRAIN, "distill": {}},
    {"method": "rarts", **TRAIN},
    {"method": "rarts", "update": "fused", **TRAIN},
    {"method": "darts1", **TRAIN},
    {"method": "darts2", **TRAIN},
    {"method": "milenas", **TRAIN},
    {"method": "bayesnas", **TRAIN, "samples": 100000},
    {"method": "bayesnas", "gamma": 1e-3, **TRAIN, "samples": 100000},
    {"method": "bayes_compress", "structure": ["filter"], "gamma": 1e-6, **TRAIN, "samples": 100000},
    {"method": "taylor", "epochs": 1},
]
FINETUNE: dict[str, Any] = {"finetune": {**TRAIN, "distill": {}}}


def run_in_two_processes(function: Callable[[Path], dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Run one of the functions below in two processes and return what each of them reports."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    done = subprocess.run(
        [
            *launch,
            *("--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"),
            *("--module", "helpers.two_processes", function.__name__, str(folder)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{number}.json").read_text()) for number in range(2)]


def collectives(folder: Path) -> dict[str, Any]:
    """Call every collective operation once."""
    device = init_process_group(cpu=True)
    number = rank()
    double = torch.tensor([1.0, 3.0], dtype=torch.float64) * number
    means = all_reduce_mean([torch.full((2, 2), float(number)), double, torch.ones(1).expand(3)])
    all_reduce_mean_([double])
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(3)]

    def terms(batch: Any) -> dict[str, Tensor]:
        return {"task": parameters[0].sum() + (parameters[1].sum() * number if number else 0)}

    result = GradientComputer().gradients(terms, torch.ones(1), parameters)
    layer = nn.Linear(2, 1)
    broadcast_module_(layer)
    norms = [float(p.detach().norm()) for p in layer.parameters()]
    sums = all_reduce_sum(torch.full((2,), 1.0, dtype=torch.float64) if number else None, 2)

    def fail() -> None:
        raise ValueError("rank 0 could not")

    failed = ""
    try:
        on_rank_zero(fail)
    except ValueError as error:
        failed = str(error)
    return {
        "means": [m.flatten().tolist() for m in means],
        "flags": [result.unused, [float(g) for g in result.gradients]],
        "same": broadcast_object(norms) == norms,
        "world": world_size(),
        "device": str(device),
        "double": double.tolist(),
        "every": all_gather_object(number),
        "first": on_rank_zero(rank),
        "failed": failed,
        "sums": sums.tolist(),
    }


def _network() -> nn.Module:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 4)).double()


def _loader(batch: int, ignored: bool = False) -> DataLoader[Any]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(128, 3, 8, 8, generator=random, dtype=torch.float64)
    y = torch.randint(0, 4, (128,), generator=random)
    if ignored:  # every third target, and all that the second process reads in its first step
        y[::3] = y[16:32] = -100
    return DataLoader(TensorDataset(x, y), batch, shuffle=not ignored)


def prune_small_network(
    search: dict[str, Any], batch: int, workdir: Path | None = None, ignored: bool = False, **more: Any
) -> dict[str, Any]:
    """Prune to half of the dimensions; return the plan, the weights, the losses and the metrics."""
    recipe = {"budget": {"dims": "50%"}, "search": search, "timing": {"repeats": 3}, **more}
    train, val = _loader(batch, ignored), _loader(batch, ignored)
    pruned = compress.prune(_network(), recipe, train=train, val=val, workdir=workdir, quiet=True)
    return {
        "keep": {name: [int(i) for i in kept] for name, kept in pruned.plan.keep.items()},
        "weights": [t.flatten().tolist() for t in pruned.model.state_dict().values()],
        "losses": [entry["loss"] for entry in pruned.report.history if "loss" in entry],
        "metrics": pruned.report.pruned.metrics,
    }


def every_search(folder: Path) -> dict[str, Any]:
    """Prune with every search, and once with fine-tuning, on half of the batch in each process."""
    runs = [prune_small_network(search, 16) for search in SEARCHES]
    runs.append(prune_small_network(SEARCHES[0], 16, folder / "out", **FINETUNE))
    return {"runs": runs, "files": sorted(path.name for path in (folder / "out").iterdir())}


IGNORING: list[dict[str, Any]] = [
    {"search": SEARCHES[0], **FINETUNE},
    {"search": SEARCHES[-1], "finetune": {**TRAIN, "distill": {}, "label_smoothing": 0.1}},
    {"search": SEARCHES[1]},
    {"search": SEARCHES[6]},
]
FEATURES: dict[str, Any] = {
    "search": SEARCHES[-1],
    "finetune": {**TRAIN, "distill": {"features": ["0", "2", "5"], "feature_weight": 3.0}},
}


def uneven_losses(folder: Path) -> dict[str, Any]:
    """Distil features, and prune on data some of whose targets are ignored, on half of the batch in each process."""
    return {
        "features": prune_small_network(batch=16, **FEATURES),
        "ignored": [prune_small_network(batch=16, ignored=True, **settings) for settings in IGNORING],
    }


class Stream(IterableDataset[int]):
    """Eight numbers in a row."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def divided_loaders(folder: Path) -> dict[str, Any]:
    """Divide loaders of every kind among the processes."""
    init_process_group(cpu=True)
    batches = [1, 2, 3]
    data: Any = list(range(10))
    own = DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False))
    parts = [
        shard_loader(DataLoader(data, 2)),
        shard_loader(DataLoader(data, 2), even_batches=False),
        shard_loader(own),
    ]
    parts += [shard_loader(DataLoader(Stream(), 2)), shard_loader(DataLoader(Stream(), None))]
    return {
        "parts": [[torch.as_tensor(batch).tolist() for batch in part] for part in parts],
        "same": [shard_loader(batches) is batches, shard_loader(own) is own, shard_loader(None) is None],
    }


def detector(folder: Path) -> dict[str, Any]:
    """Prune and fine-tune a small detector on the pictures in `folder`."""
    import compress.mmdet
    from compress.mmdet.commands import build_for_command
    from helpers.detectors import small_config

    cfg = small_config(folder / "pictures")
    torch.manual_seed(int(os.environ["RANK"]))  # fresh weights that differ: those of rank 0 count
    model, task = build_for_command(cfg, None, [], 0, quiet=True)
    search = {"method": "rarts", "epochs": "2 steps", "optimizer": "adamw", "lr": 1e-3, "distill": {}}
    recipe = {
        "target": {"channels": False, "attention": True, "mlp": True},
        "budget": {"dims": "50%"},
        "search": search,
        "finetune": {"epochs": 1, "distill": {}},
        "timing": {"repeats": 3},
    }
    seen = [sample.metainfo["img_id"] for batch in task.train for sample in batch["data_samples"]]
    pruned = compress.prune(model, recipe, task=task, workdir=folder / "out", quiet=True)
    weights = hashlib.sha256()
    for name, tensor in pruned.model.state_dict().items():
        weights.update(name.encode() + tensor.numpy().tobytes())
    return {
        "seen": seen,
        "keep": pruned.plan.keep,
        "model": weights.hexdigest(),
        "metrics": pruned.report.pruned.metrics,
        "steps": [entry["step"] for entry in pruned.report.history if "loss_distil" in entry],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    report = globals()[sys.argv[1]](Path(sys.argv[2]))
    (Path(sys.argv[2]) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))
