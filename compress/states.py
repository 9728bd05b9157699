"""States that a network is in while it is trained, and not afterwards: batch norms in step, code compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .engine import Engine
from .processes import world

SHARDED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def objections(engine: Engine) -> list[str]:
    """What the recipe or the launcher asks for and cannot be had here."""
    wrong = []
    if engine.config.sync_batchnorm and engine.device.type == "cpu":
        wrong.append("engine.sync_batchnorm: torch's batch norms over processes run on GPUs alone; leave it out")
    if engine.config.passes == "fp16" and engine.device.type == "cpu":
        wrong.append("engine.precision: fp16 is for GPUs; on this CPU say bf16, or leave it out")
    asked = [name for name in SHARDED if os.environ.get(name, "").lower() in ("1", "true")]
    if asked:
        wrong.append(
            f"{asked[0]}: the launcher asks for sharded training, which pruning does not do. Scores multiply whole "
            "weights, and the dense teacher has to fit beside the compact network anyway. Launch with plain data "
            "parallelism; to fine-tune the result sharded, load it with compress.load in a training loop of your own"
        )
    return wrong


def lay_out_(model: nn.Module, engine: Engine) -> None:
    """Weights in the memory format that the recipe asks for."""
    if engine.config.channels_last:
        model.to(memory_format=torch.channels_last)


@contextmanager
def synchronised(model: nn.Module, engine: Engine) -> Iterator[None]:
    """Batch norms take their statistics over all processes inside, if the recipe says so."""
    norms: list[tuple[Any, type[nn.Module]]] = []
    if engine.config.sync_batchnorm and world() > 1:
        norms = [(m, type(m)) for m in model.modules() if type(m) in PLAIN]
    for norm, _ in norms:
        norm.__class__, norm.process_group = nn.SyncBatchNorm, None
    try:
        yield
    finally:
        for norm, kind in norms:
            norm.__class__ = kind
            del norm.process_group


@contextmanager
def compiled(engine: Engine, *models: nn.Module) -> Iterator[None]:
    """The models run compiled inside, if the recipe says so; they are the same objects before and after."""
    mine: list[Any] = [m for m in models if engine.config.compile]
    for model in mine:
        model.compile(**({"backend": engine.config.compile} if isinstance(engine.config.compile, str) else {}))
    try:
        yield
    finally:
        for model in mine:
            model._compiled_call_impl = None
