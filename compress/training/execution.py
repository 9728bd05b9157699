"""Execution modes of a network during training: synchronized batch norms, torch.compile, memory format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from compress.distributed import world_size
from compress.recipe import Finetune

from .engine import Engine
from .parallel.launch import sharding_problems
from .task import Task

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def launch_problems(engine: Engine, model: nn.Module, finetune: Finetune | None, task: Task) -> list[str]:
    """Return what the recipe or the launcher asks for and this device or library does not support."""
    problems = []
    if engine.config.sync_batchnorm and engine.device.type == "cpu":
        problems.append("engine.sync_batchnorm: torch synchronizes batch norms on GPUs only; leave it out")
    if engine.config.effective_precision == "fp16" and engine.device.type == "cpu":
        problems.append("engine.precision: fp16 needs a GPU; use bf16 on this CPU, or leave it out")
    problems += sharding_problems(model, engine.config, finetune, task.has_own_fine_tuning)
    return problems


def set_memory_format_(model: nn.Module, engine: Engine) -> None:
    """Set the memory format of the weights that the recipe asks for."""
    if engine.config.channels_last:
        model.to(memory_format=torch.channels_last)


@contextmanager
def synchronized_batch_norms(model: nn.Module, engine: Engine) -> Iterator[None]:
    """Compute batch norm statistics over all processes during the block, if the recipe asks for it."""
    norms: list[tuple[Any, type[nn.Module]]] = []
    if engine.config.sync_batchnorm and world_size() > 1:
        norms = [(m, type(m)) for m in model.modules() if type(m) in BATCH_NORMS]
    for norm, _ in norms:
        norm.__class__, norm.process_group = nn.SyncBatchNorm, None
    try:
        yield
    finally:
        for norm, kind in norms:
            norm.__class__ = kind
            del norm.process_group


@contextmanager
def compiled_models(engine: Engine, *models: nn.Module) -> Iterator[None]:
    """Run the models compiled during the block, if the recipe asks for it; they stay the same objects."""
    compiled: list[Any] = [m for m in models if engine.config.compile]
    for model in compiled:
        model.compile(**({"backend": engine.config.compile} if isinstance(engine.config.compile, str) else {}))
    try:
        yield
    finally:
        for model in compiled:
            model._compiled_call_impl = None
