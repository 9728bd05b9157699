"""Collective operations of processes that prune one model together, each on its part of the data.

`init_process_group` sets up `torch.distributed` if `torchrun` or `accelerate launch` started several processes and the
caller has not done so. With one process all functions here do nothing.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

T = TypeVar("T")


def init_process_group(cpu: bool) -> torch.device | None:
    """Join the other launched processes and return the device of this one; None if there are no others."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 and not _is_distributed():
        return None
    if not dist.is_initialized():
        from accelerate import PartialState

        atexit.register(destroy_process_group)  # before the interpreter frees what gloo's threads use
        device: torch.device = PartialState(cpu=cpu or not torch.cuda.is_available()).device
        return torch.device("cpu") if device.type == "cpu" else device  # without an index
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    gpu = torch.cuda.is_available() and dist.get_backend() != "gloo" and not cpu
    return torch.device("cuda", local_rank % torch.cuda.device_count()) if gpu else torch.device("cpu")


def destroy_process_group() -> None:
    """Leave the process group, at the end of a program."""
    if dist.is_available() and dist.is_initialized():
        # Gloo's threads free the tensors of the last operation after it is done, for which they need the interpreter:
        # if it ends before them, the process aborts.
        time.sleep(0.2)
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Wait until all processes are here; a barrier has no tensors that gloo's threads would free later."""
    if _is_distributed():
        dist.barrier()


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if _is_distributed() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if _is_distributed() else 1


@torch.no_grad()
def all_reduce_mean(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the mean of each tensor over the processes, in one message per dtype."""
    means = list(tensors)
    for dtype in dict.fromkeys(t.dtype for t in means) if _is_distributed() else ():
        indices = [i for i, t in enumerate(means) if t.dtype == dtype]
        flat = torch.cat([means[i].flatten() for i in indices])
        dist.all_reduce(flat)
        parts = torch.split(flat.div_(dist.get_world_size()), [means[i].numel() for i in indices])
        for i, part in zip(indices, parts, strict=True):
            means[i] = part.view(means[i].shape)
    return means


@torch.no_grad()
def all_reduce_mean_(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its mean over the processes."""
    if _is_distributed():
        for tensor, value in zip(tensors, all_reduce_mean(tensors), strict=True):
            tensor.copy_(value)


def all_reduce_sum(sums: Tensor | None, size: int) -> Tensor:
    """Return the sum over the processes of a vector of `size` numbers; None counts as zeros."""
    total = torch.zeros(size, dtype=torch.float64) if sums is None else sums
    if _is_distributed():
        if dist.get_backend() == "nccl":
            total = total.cuda()
        dist.all_reduce(total)
    return total


def broadcast_object(value: T) -> T:
    """Return the value of rank 0 on all processes."""
    if not _is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_rank_zero(fn: Callable[[], T]) -> T:
    """Run `fn` on rank 0 and broadcast its result; an exception is raised on all processes."""
    if not _is_distributed():
        return fn()
    result: Any = None
    error: Exception | None = None
    if rank() == 0:
        try:
            result = fn()
        except Exception as caught:
            error = caught
    result, remote_error = broadcast_object((result, None if error is None else (type(error), str(error))))
    if error is not None:
        raise error
    if remote_error is not None:
        kind, text = remote_error
        raise kind(text) if kind.__module__.startswith(("builtins", "compress")) else RuntimeError(text)
    value: T = result
    return value


def all_gather_object(value: T) -> list[T]:
    """Return the values of all processes, by rank."""
    if not _is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


@torch.no_grad()
def broadcast_module_(model: nn.Module) -> None:
    """Copy the parameters and buffers of rank 0 to all processes."""
    if _is_distributed():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, src=0)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
