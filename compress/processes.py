"""Several processes that prune one model: each has its part of the data, all make the same steps.

`join` sets up `torch.distributed` where `torchrun` or `accelerate launch` has started several, and the caller has not.
With one process, everything else here does nothing.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch import distributed as dist

T = TypeVar("T")


def join(cpu: bool) -> torch.device | None:
    """Meet the other processes that were launched, if any; returns the device of this one then."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 and not _several():
        return None
    if not dist.is_initialized():
        atexit.register(leave)  # before the interpreter takes down what gloo's threads work with
        found: torch.device = PartialState(cpu=cpu or not torch.cuda.is_available()).device
        return torch.device("cpu") if found.type == "cpu" else found  # which has no number
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpu = torch.cuda.is_available() and dist.get_backend() != "gloo" and not cpu
    return torch.device("cuda", local % torch.cuda.device_count()) if gpu else torch.device("cpu")


def leave() -> None:
    """Part from the other processes, at the end of a program."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if _several() else 0


def world() -> int:
    """How many there are."""
    return dist.get_world_size() if _several() else 1


@torch.no_grad()
def mean(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each one's mean over the processes; they travel together, all of one type at a time."""
    found = list(tensors)
    for dtype in dict.fromkeys(t.dtype for t in found) if _several() else ():
        some = [i for i, t in enumerate(found) if t.dtype == dtype]
        flat = torch.cat([found[i].flatten() for i in some])
        dist.all_reduce(flat)
        parts = torch.split(flat.div_(dist.get_world_size()), [found[i].numel() for i in some])
        for i, part in zip(some, parts, strict=True):
            found[i] = part.view(found[i].shape)
    return found


@torch.no_grad()
def mean_(tensors: Sequence[Tensor]) -> None:
    """Replace each by its mean over the processes."""
    if _several():
        for tensor, value in zip(tensors, mean(tensors), strict=True):
            tensor.copy_(value)


def total(sums: Tensor | None, size: int) -> Tensor:
    """The sum over the processes of so many numbers; None is nothing."""
    found = torch.zeros(size, dtype=torch.float64) if sums is None else sums
    if _several():
        if dist.get_backend() == "nccl":
            found = found.cuda()
        dist.all_reduce(found)
    return found


def agreed(value: T) -> T:
    """The first process's value, in all."""
    if not _several():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def first(act: Callable[[], T]) -> T:
    """What the first process finds when it does this, in all; if it fails, all fail alike."""
    if not _several():
        return act()
    value: Any = None
    error: Exception | None = None
    if rank() == 0:
        try:
            value = act()
        except Exception as caught:
            error = caught
    value, said = agreed((value, None if error is None else (type(error), str(error))))
    if error is not None:
        raise error
    if said is not None:
        kind, text = said
        raise kind(text) if kind.__module__.startswith(("builtins", "compress")) else RuntimeError(text)
    found: T = value
    return found


def everyone(value: T) -> list[T]:
    """The value of each process, in all."""
    if not _several():
        return [value]
    box: list[Any] = [None] * world()
    dist.all_gather_object(box, value)
    return box


@torch.no_grad()
def agree_(model: nn.Module) -> None:
    """Give every process the first one's parameters and buffers."""
    if _several():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, src=0)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
