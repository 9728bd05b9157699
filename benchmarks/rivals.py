"""Torch-Pruning's methods with the settings of its own CIFAR-10 scripts, cut until a budget of multiply-adds is met.

Sparse training makes the steps of a search of ours, on the same data with the same optimiser, and adds the pruner's
regularisation to the gradients as its scripts do. The inner channels of all blocks are cut, all at once and globally,
as ours are. Residual streams are left out for its sake: it takes the zeros that these networks pad their streams with
for an elementwise operator, joins the wrong channels, and ends lower.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
import torch_pruning as tp
from torch import nn

from compress.engine import Engine
from compress.fields import Length, Training
from compress.optimise import optimiser, rate, set_rate
from compress.task import Task

from .zoo import count_macs

ROUNDS = 400  # of its iterative pruning: as many as in its scripts
READ = 20  # batches whose gradients Taylor takes
RATE = 0.02  # of sparse training
METHODS: dict[str, dict[str, Any]] = {
    "tp random": {"importance": lambda: tp.importance.RandomImportance()},
    "tp magnitude": {"importance": lambda: tp.importance.GroupMagnitudeImportance(p=2)},
    "tp taylor": {"importance": lambda: tp.importance.GroupTaylorImportance(), "reads": READ},
    "tp bn scale": {
        "importance": lambda: tp.importance.BNScaleImportance(),
        "pruner": tp.pruner.BNScalePruner,
        "reg": 1e-5,
    },
    "tp group norm": {
        "importance": lambda: tp.importance.GroupMagnitudeImportance(p=2),
        "pruner": tp.pruner.GroupNormPruner,
        "reg": 5e-4,
    },
}


def prune(
    name: str, model: nn.Module, left: float, task: Task, steps: int, engine: Engine
) -> tuple[nn.Module, dict[str, Any]]:
    """Cut the model in place; what was spent, in batches and seconds."""
    settings, loader = METHODS[name], task.train
    assert loader is not None
    example = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    inner = [m for name, m in model.named_modules() if ".conv1" in name]
    others = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)) and m not in inner]
    more = {"reg": settings["reg"]} if "reg" in settings else {}
    start = time.perf_counter()
    tool = settings.get("pruner", tp.pruner.BasePruner)(
        model,
        example,
        importance=settings["importance"](),
        global_pruning=True,
        pruning_ratio=1.0,
        iterative_steps=ROUNDS,
        ignored_layers=others,
        in_channel_groups={},
        out_channel_groups={},
        num_heads={},
        **more,
    )
    read = 0
    if "reg" in settings:
        read = steps
        _sparse(model, tool, islice(_endless(loader), steps), steps, engine)
    elif "reads" in settings:
        read = settings["reads"]
        model.eval()
        for x, y in map(engine.move, islice(_endless(loader), read)):
            (F.cross_entropy(model(x), y) / read).backward()
    searched = time.perf_counter()
    model.eval()
    dense = count_macs(model, example)
    while count_macs(model, example) > left * dense:
        tool.step()
    for p in model.parameters():
        p.grad = None
    return model, {"batches": read, "search": searched - start, "slice": time.perf_counter() - searched}


def _sparse(model: nn.Module, tool: Any, batches: Iterable[Any], steps: int, engine: Engine) -> None:
    config = Training(epochs=Length(count=steps, unit="steps"), lr=RATE)
    optimizer = optimiser(config, model.parameters())
    model.train()
    tool.update_regularizer()
    for done, (x, y) in enumerate(map(engine.move, batches)):
        set_rate(optimizer, rate(config, done, steps))
        optimizer.zero_grad()
        with engine.compute.autocast():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        tool.regularize(model)
        optimizer.step()


def _endless(loader: Iterable[Any]) -> Iterable[Any]:
    while True:
        yield from loader
