"""Torch-Pruning's methods with the settings of its own CIFAR-10 scripts, iterated until a MACs budget is met.

Sparse training makes as many steps as our searches, on the same data with the same optimizer, and adds the pruner's
regularization to the gradients as its scripts do. The inner channels of all blocks are cut, globally, as in our
searches. Residual streams are not cut, in favor of Torch-Pruning: it treats the zero padding of the shortcuts as an
elementwise operator, couples the wrong channels, and ends with a lower accuracy.
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

from compress.recipe import Length, TrainingConfig
from compress.training import Engine, Task, lr_factor, make_optimizer, set_lr_

from .methods import PruningCost
from .zoo import count_macs

ITERATIVE_STEPS = 400  # of iterative pruning, as in Torch-Pruning's scripts
TAYLOR_BATCHES = 20  # batches whose gradients the Taylor importance uses
SPARSE_LR = 0.02  # learning rate of sparse training
METHODS: dict[str, dict[str, Any]] = {
    "tp random": {"importance": lambda: tp.importance.RandomImportance()},
    "tp magnitude": {"importance": lambda: tp.importance.GroupMagnitudeImportance(p=2)},
    "tp taylor": {"importance": lambda: tp.importance.GroupTaylorImportance(), "reads": TAYLOR_BATCHES},
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
    name: str, model: nn.Module, fraction_left: float, task: Task, steps: int, engine: Engine
) -> tuple[nn.Module, PruningCost]:
    """Prune the model in place; return it and the cost of the search."""
    settings, loader = METHODS[name], task.train
    assert loader is not None
    example = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    inner_convs = [m for name, m in model.named_modules() if ".conv1" in name]
    ignored = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)) and m not in inner_convs]
    regularization = {"reg": settings["reg"]} if "reg" in settings else {}
    start = time.perf_counter()
    pruner = settings.get("pruner", tp.pruner.BasePruner)(
        model,
        example,
        importance=settings["importance"](),
        global_pruning=True,
        pruning_ratio=1.0,
        iterative_steps=ITERATIVE_STEPS,
        ignored_layers=ignored,
        in_channel_groups={},
        out_channel_groups={},
        num_heads={},
        **regularization,
    )
    batches = 0
    if "reg" in settings:
        batches = steps
        _train_sparse_(model, pruner, islice(_cycle(loader), steps), steps, engine)
    elif "reads" in settings:
        batches = settings["reads"]
        model.eval()
        for x, y in map(engine.move, islice(_cycle(loader), batches)):
            (F.cross_entropy(model(x), y) / batches).backward()
    search_end = time.perf_counter()
    model.eval()
    dense_macs = count_macs(model, example)
    while count_macs(model, example) > fraction_left * dense_macs:
        pruner.step()
    for p in model.parameters():
        p.grad = None
    return model, PruningCost(batches, search_end - start, time.perf_counter() - search_end)


def _train_sparse_(model: nn.Module, pruner: Any, batches: Iterable[Any], steps: int, engine: Engine) -> None:
    """Train with Torch-Pruning's sparsity regularization."""
    config = TrainingConfig(epochs=Length(count=steps, unit="steps"), lr=SPARSE_LR)
    optimizer = make_optimizer(config, model.parameters())
    model.train()
    pruner.update_regularizer()
    for step, (x, y) in enumerate(map(engine.move, batches)):
        set_lr_(optimizer, lr_factor(config, step, steps))
        optimizer.zero_grad()
        with engine.gradient_computer.autocast():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        pruner.regularize(model)
        optimizer.step()


def _cycle(loader: Iterable[Any]) -> Iterable[Any]:
    while True:
        yield from loader
