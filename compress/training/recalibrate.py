"""Recalibration of batch norms after a cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from compress.data import derive_seed, reproducible_reading, seed_loader

from .engine import Engine
from .task import Task


@torch.no_grad()
def recalibrate_(model: nn.Module, task: Task, loader: Iterable[Any], batches: int, engine: Engine) -> None:
    """Replace the running statistics of batch norms by averages over `batches` training batches."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    flags = [(m, m.training) for m in model.modules()]
    for m, _ in flags:
        m.training = False
    for norm in norms:
        norm.reset_running_stats()
        norm.training = True
    calls: Counter[nn.Module] = Counter()

    def average_all_calls(norm: Any, inputs: Any) -> None:
        calls[norm] += 1
        norm.momentum = 1 / calls[norm]  # as momentum None does, which reads its own count back from the device

    hooks = [norm.register_forward_pre_hook(average_all_calls) for norm in norms]
    try:
        with engine.display.bar("recalibrate", batches) as bar, reproducible_reading(loader):
            seed_loader(loader, derive_seed(engine.seed, "recalibrate"), 0)
            for number, batch in enumerate(loader, 1):
                task.forward(model, engine.move(batch))
                bar.advance()
                if number == batches:
                    break
    finally:
        for hook in hooks:
            hook.remove()
        for m, flag in flags:
            m.training = flag
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
