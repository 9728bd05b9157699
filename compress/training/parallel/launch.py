"""Sharding as the launcher asks for it: `accelerate launch` passes its settings in environment variables."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch import nn

from compress.distributed import world_size
from compress.recipe import EngineConfig, Finetune

from .fully_sharded import FullyShardedStudent, fully_shard_, fully_shard_problems
from .student import Student
from .zero import ZeroStudent, zero_problems


class Sharding(Enum):
    """Ways to divide a network in training among processes, by the variable that asks for them."""

    FSDP = "ACCELERATE_USE_FSDP"
    DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
    MEGATRON = "ACCELERATE_USE_MEGATRON_LM"


def requested_sharding() -> Sharding | None:
    """Return the sharding that the launcher asks for; None if there is none, or only one process."""
    if world_size() == 1:
        return None
    return next((kind for kind in Sharding if os.environ.get(kind.value, "").lower() in ("1", "true")), None)


def sharding_problems(network: nn.Module, config: EngineConfig, finetune: Finetune | None, own_loop: bool) -> list[str]:
    """Return what the launcher asks for and the recipe, the task or this library does not support.

    Args:
        own_loop: the task fine-tunes in a loop of its own.
    """
    sharding = requested_sharding()
    needs_fsdp = ["engine.shard_teacher: needs several processes and FSDP; launch with accelerate launch --use_fsdp"]
    if sharding is None:
        return needs_fsdp if config.shard_teacher else []
    if sharding is Sharding.MEGATRON:
        return [
            f"{sharding.value}: expected plain data parallelism, FSDP or DeepSpeed; the launcher asks for Megatron, "
            "whose layers fine-tuning does not know. Set another distributed type with accelerate config"
        ]
    name = sharding.value
    if finetune is None:
        return [
            f"{name}: the launcher asks for sharding, which is for fine-tuning only, and the recipe has no finetune "
            "section: a search needs whole weights in each process. Launch without it, or add finetune"
        ]
    if own_loop:
        return [f"{name}: the task fine-tunes in its own loop, which has its own settings. Launch without sharding"]
    problems = fully_shard_problems(network) if sharding is Sharding.FSDP else zero_problems(network)
    if finetune.ema is not None:
        problems.append(f"finetune.ema: needs the whole network in each process, and {name} shards it; leave one out")
    if config.compile:
        problems.append(f"engine.compile: is not supported together with {name}; leave one out")
    if config.effective_precision == "fp16":
        problems.append(f"engine.precision: expected float32 or bf16 together with {name}; got fp16")
    if config.shard_teacher and sharding is Sharding.DEEPSPEED:
        problems.append("engine.shard_teacher: DeepSpeed shards only what is trained; use FSDP, or leave it out")
    if config.shard_teacher and finetune.distill is not None and finetune.distill.features:
        problems.append("engine.shard_teacher: finetune.distill.features needs the whole teacher; leave one out")
    return problems


def make_student(network: nn.Module, config: Finetune, device: torch.device) -> Student:
    """Return the network in training: sharded if the launcher asks for it, else whole in each process."""
    if requested_sharding() is Sharding.FSDP:
        return FullyShardedStudent(network, config, device)
    if requested_sharding() is Sharding.DEEPSPEED:
        return ZeroStudent(network, config, device)
    return Student(network, config)


def make_teacher(network: nn.Module, config: EngineConfig, device: torch.device) -> nn.Module:
    """Return the teacher: a sharded copy if launcher and recipe ask for it, else the network itself."""
    if requested_sharding() is Sharding.FSDP and config.shard_teacher:
        network = copy.deepcopy(network)
        fully_shard_(network, device)
    return network


@contextmanager
def teacher_in_main_memory(network: nn.Module, config: EngineConfig) -> Iterator[None]:
    """Keep a teacher of which there is a sharded copy in main memory during the block."""
    is_moved = requested_sharding() is Sharding.FSDP and config.shard_teacher
    tensors = [*network.parameters(), *network.buffers()] if is_moved else []
    devices = [tensor.device for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.cpu()
    try:
        yield
    finally:
        for tensor, device in zip(tensors, devices, strict=True):
            tensor.data = tensor.data.to(device)
