"""Torch-Pruning's methods with the settings of its own CIFAR-10 scripts, cut until a budget of multiply-adds is met.

Sparse training makes the steps of a search of ours, on the same data with the same optimiser, and adds the pruner's
regularisation to the gradients as its scripts do. All groups may be cut but the classifier, all at once and globally.
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

from compress.fields import Length, Training
from compress.optimise import optimiser, rate, set_rate

from .zoo import count_macs

ROUNDS = 400  # of its iterative pruning: as many as in its scripts
READ = 50  # batches whose gradients Taylor takes
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


def prune(name: str, model: nn.Module, left: float, loader: Iterable[Any], steps: int, lr: float) -> dict[str, Any]:
    """Cut the model in place; what was spent, in batches and seconds."""
    settings = METHODS[name]
    example = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    classifier = [m for m in model.modules() if isinstance(m, nn.Linear)]
    more = {"reg": settings["reg"]} if "reg" in settings else {}
    start = time.perf_counter()
    tool = settings.get("pruner", tp.pruner.BasePruner)(
        model,
        example,
        importance=settings["importance"](),
        global_pruning=True,
        pruning_ratio=1.0,
        iterative_steps=ROUNDS,
        ignored_layers=classifier,
        in_channel_groups={},
        out_channel_groups={},
        num_heads={},
        **more,
    )
    read = 0
    if "reg" in settings:
        read = steps
        _sparse(model, tool, islice(_endless(loader), steps), steps, lr)
    elif "reads" in settings:
        read = settings["reads"]
        model.eval()
        for x, y in islice(_endless(loader), read):
            (F.cross_entropy(model(x), y) / read).backward()
    searched = time.perf_counter()
    model.eval()
    dense = count_macs(model, example)
    while count_macs(model, example) > left * dense:
        tool.step()
    for p in model.parameters():
        p.grad = None
    return {"batches": read, "search": searched - start, "slice": time.perf_counter() - searched}


def _sparse(model: nn.Module, tool: Any, batches: Iterable[Any], steps: int, lr: float) -> None:
    config = Training(epochs=Length(count=steps, unit="steps"), lr=lr)
    optimizer = optimiser(config, model.parameters())
    model.train()
    tool.update_regularizer()
    for done, (x, y) in enumerate(batches):
        set_rate(optimizer, rate(config, done, steps))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        tool.regularize(model)
        optimizer.step()


def _endless(loader: Iterable[Any]) -> Iterable[Any]:
    while True:
        yield from loader
