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
from torch.distributed.tensor import DTensor
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
from compress.recipe import Finetune
from compress.training import engine as engine_module
from compress.training.fine_tuning import FineTuner
from compress.training.gradients import GradientComputer
from compress.training.parallel.launch import make_student
from helpers.reduced_gradients import overflowing_gradients, reduced_gradients  # noqa: F401
from helpers.repaired_attention import repair_attention, repair_small_attention  # noqa: F401
from helpers.task_metrics import task_metrics  # noqa: F401

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
    {"method": "rvsm", **TRAIN, "distill": {}},
    {"method": "aps", **TRAIN, "settle": 0.3, "distill": {}, "diagnostics": 2, "controller": {"lr": 0.05, "draws": 2}},
    {"method": "taylor", "epochs": 1},
]
FINETUNE: dict[str, Any] = {"finetune": {**TRAIN, "distill": {}}}


def run_in_two_processes(
    function: Callable[[Path], dict[str, Any]], folder: Path, **variables: str
) -> list[dict[str, Any]]:
    """Run one of the functions below in two processes and return what each of them reports.

    Args:
        variables: of the environment, as a launcher sets them.
    """
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
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
            **variables,
        },
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


def _network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 4)).to(dtype)


def _loader(batch: int, ignored: bool = False, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(128, 3, 8, 8, generator=random, dtype=torch.float64).to(dtype)
    y = torch.randint(0, 4, (128,), generator=random)
    if ignored:  # every third target, and all that the second process reads in its first step
        y[::3] = y[16:32] = -100
    return DataLoader(TensorDataset(x, y), batch, shuffle=not ignored)


def prune_small_network(
    search: dict[str, Any],
    batch: int,
    workdir: Path | None = None,
    ignored: bool = False,
    resume: bool = False,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> dict[str, Any]:
    """Prune to half of the dimensions; return the plan, the weights, the losses and the metrics."""
    recipe = {"budget": {"dims": "50%"}, "search": search, "timing": {"repeats": 3}, **more}
    train, val = _loader(batch, ignored, dtype), _loader(batch, ignored, dtype)
    pruned = compress.prune(_network(dtype), recipe, train=train, val=val, workdir=workdir, resume=resume, quiet=True)
    return {
        "keep": {name: [int(i) for i in kept] for name, kept in pruned.plan.keep.items()},
        "weights": [t.flatten().tolist() for t in pruned.model.state_dict().values()],
        "losses": [entry["loss"] for entry in pruned.report.history if "loss" in entry],
        "metrics": pruned.report.pruned.metrics,
        "costs": [costs.to_dict() for costs in pruned.report.costs],
    }


def every_search(folder: Path) -> dict[str, Any]:
    """Prune with every search, and once with fine-tuning, on half of the batch in each process."""
    runs = [prune_small_network(search, 16) for search in SEARCHES]
    runs.append(prune_small_network(SEARCHES[0], 16, folder / "out", **FINETUNE))
    return {"runs": runs, "files": sorted(path.name for path in (folder / "out").iterdir())}


def repair(folder: Path) -> dict[str, Any]:
    """Prune and repair on half of the calibration batches in each process, and on half of the training batches."""
    return {"given": repair_small_network(given=True), "train": repair_small_network(given=False)}


def repair_small_network(given: bool) -> dict[str, Any]:
    """Prune by magnitude and repair; return the plan, the weights and the errors of the layers."""
    recipe = {"budget": {"dims": "60%"}, "search": "magnitude", "compensate": "least_squares", "timing": {"repeats": 3}}
    images = torch.randn(128, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batches = list(torch.split(images, 16))
    loader = DataLoader(TensorDataset(images, torch.zeros(128, dtype=torch.long)), 16)
    inputs: dict[str, Any] = {"calibration": batches} if given else {"train": loader}
    pruned = compress.prune(_network(), recipe, **inputs, quiet=True)
    return {
        "keep": {name: [int(i) for i in kept] for name, kept in pruned.plan.keep.items()},
        "weights": [t.flatten().tolist() for t in pruned.model.state_dict().values()],
        "losses": [layer["error_after"] for layer in pruned.report.repair["layers"]],
        "metrics": {"batches": pruned.report.repair["batches"]} if given else {},
    }


OPERATION_SEARCHES: list[dict[str, Any]] = [
    {"method": "rarts", **TRAIN},
    {"method": "darts2", **TRAIN},
    {"method": "bayesnas", **TRAIN, "samples": 100000},
    {"method": "random"},
]


def choose_operations(search: dict[str, Any], batch: int) -> dict[str, Any]:
    """Choose the operations of a small network within a budget; return the plan, the strengths and the losses."""
    torch.manual_seed(0)
    choice = compress.Choice(conv=nn.Conv2d(8, 8, 3, padding=1), point=nn.Conv2d(8, 8, 1), skip=nn.Identity())
    layers = nn.Conv2d(3, 8, 3), nn.GELU(), choice, nn.GELU(), nn.Flatten(), nn.Linear(288, 4)
    recipe = {"target": {"operations": True}, "budget": {"macs": "90%"}, "search": search, "timing": {"repeats": 3}}
    pruned = compress.prune(
        nn.Sequential(*layers).double(), recipe, train=_loader(batch), val=_loader(batch), quiet=True
    )
    return {
        "choices": pruned.plan.choices,
        "strengths": [*pruned.report.operations[0].strengths.values()],
        "losses": [entry["loss"] for entry in pruned.report.history if "loss" in entry],
        "costs": [costs.to_dict() for costs in pruned.report.costs],
    }


def every_operation_search(folder: Path) -> dict[str, Any]:
    """Choose operations with some searches, on half of the batch in each process."""
    return {"runs": [choose_operations(search, 16) for search in OPERATION_SEARCHES]}


def landscape(folder: Path) -> dict[str, Any]:
    """Evaluate a landscape; every process finds all values, and the first writes them."""
    found = compress.landscape(
        _network(),
        _loader(16),
        resolution=3,
        variance_resolution=3,
        batches=3,
        file=folder / "landscape.json",
        device="cpu",
        quiet=True,
    )
    return found.to_dict()


IGNORING: list[dict[str, Any]] = [
    {"search": SEARCHES[0], **FINETUNE},
    {"search": SEARCHES[-1], "finetune": {**TRAIN, "distill": {}, "label_smoothing": 0.1}},
    {"search": SEARCHES[1]},
    {"search": SEARCHES[6]},
    {"search": SEARCHES[-2]},
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


ADAMW: dict[str, Any] = {"epochs": 1, "lr": 1e-3, "optimizer": "adamw", "clip": 1.0, "distill": {}}
SHARDED: dict[str, dict[str, Any]] = {
    "sgd": {"batch": 16, "finetune": FINETUNE["finetune"]},
    "adamw": {"batch": 16, "finetune": ADAMW},
    "features": {"batch": 16, "finetune": FEATURES["finetune"]},
    "accumulated": {"batch": 8, "finetune": ADAMW, "engine": {"accumulate": 2}},
    "ignored": {"batch": 16, "finetune": ADAMW, "ignored": True},
    "teacher": {"batch": 16, "finetune": ADAMW, "engine": {"shard_teacher": True}},
}


def _interrupted_run(workdir: Path, **settings: Any) -> tuple[dict[str, Any], int]:
    """Fine-tune with a checkpoint after every step; interrupt it every few steps, and resume."""
    original_step, interval, ratio = FineTuner.step, engine_module.SAVE_INTERVAL, engine_module.MIN_SAVE_RATIO
    engine_module.SAVE_INTERVAL, engine_module.MIN_SAVE_RATIO = -1.0, 0
    interruptions, steps = 0, 0

    def step(self: FineTuner, batch: Any) -> dict[str, Tensor]:
        nonlocal steps
        steps += 1
        if steps % 4 == 0:
            raise KeyboardInterrupt
        return original_step(self, batch)

    FineTuner.step = step  # type: ignore[method-assign]
    try:
        while True:
            try:
                run = prune_small_network(SEARCHES[-1], workdir=workdir, resume=interruptions > 0, **settings)
                return run, interruptions
            except KeyboardInterrupt:
                interruptions += 1
    finally:
        FineTuner.step = original_step  # type: ignore[method-assign]
        engine_module.SAVE_INTERVAL, engine_module.MIN_SAVE_RATIO = interval, ratio


def sharded_fine_tuning(folder: Path) -> dict[str, Any]:
    """Fine-tune in the processes as the launcher says; once interrupted after every step and resumed."""
    runs = {name: prune_small_network(SEARCHES[-1], **settings) for name, settings in SHARDED.items()}
    network, config = _network(), Finetune(epochs=1)
    student = make_student(network, config, torch.device("cpu"))
    own, freed = sum(_local_size(p) for p in student.weights), sum(p.numel() for p in network.parameters())
    student.finish_()
    sizes = [own / sum(p.numel() for p in network.parameters()), freed]
    runs["resumed"], interruptions = _interrupted_run(folder / "out", **SHARDED["adamw"])
    return {"runs": runs, "interruptions": interruptions, "sizes": sizes}


ZERO: dict[str, dict[str, Any]] = {
    "sgd": {"batch": 16, "finetune": FEATURES["finetune"]},
    "adamw": {"batch": 8, "finetune": ADAMW, "engine": {"accumulate": 2}},
}


def zero_fine_tuning(folder: Path) -> dict[str, Any]:
    """Fine-tune with DeepSpeed in every stage; in each once interrupted and resumed."""
    report: dict[str, Any] = {}
    for stage in "123":
        os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = stage
        runs = {
            name: prune_small_network(SEARCHES[-1], dtype=torch.float32, **settings) for name, settings in ZERO.items()
        }
        settings = {**ZERO["adamw"], "dtype": torch.float32}
        runs["resumed"], interruptions = _interrupted_run(folder / f"out{stage}", **settings)
        report[stage] = {"runs": runs, "interruptions": interruptions}
    return report


def _local_size(parameter: Any) -> int:
    return int(parameter.to_local().numel()) if isinstance(parameter, DTensor) else parameter.numel()


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
