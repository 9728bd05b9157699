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
_groups: dict[str, dist.ProcessGroup] = {}  # that this module has made; their operations need no GPU


def init_process_group(cpu: bool) -> torch.device | None:
    """Join the other launched processes and return the device of this one; None if there are no others."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 and not _is_distributed():
        return None
    if not dist.is_initialized():
        from accelerate import PartialState

        atexit.register(destroy_process_group)  # before the interpreter frees what gloo's threads use
        if is_restarted():
            _join_restarted_processes(cpu or not torch.cuda.is_available())
        device: torch.device = PartialState(cpu=cpu or not torch.cuda.is_available()).device
        return torch.device("cpu") if device.type == "cpu" else device  # without an index
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    gpu = torch.cuda.is_available() and dist.get_backend() != "gloo" and not cpu
    return torch.device("cuda", local_rank % torch.cuda.device_count()) if gpu else torch.device("cpu")


def is_restarted() -> bool:
    """Return whether `torchrun --max-restarts` has restarted this process after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _join_restarted_processes(cpu: bool) -> None:
    """Join the processes of this restart, apart from those of the attempts before.

    torchrun keeps its store over restarts. A process could read there the address of one that was killed.
    """
    environment = os.environ
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    number, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    store = dist.TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), size, is_master=False)  # type: ignore[attr-defined]
    attempt = dist.PrefixStore(f"restart{environment['TORCHELASTIC_RESTART_COUNT']}", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo" if cpu else None, store=attempt, rank=number, world_size=size)


def destroy_process_group() -> None:
    """Leave the process group, at the end of a program."""
    if dist.is_available() and dist.is_initialized():
        # Gloo's threads free the tensors of the last operation after it is done, for which they need the interpreter:
        # if it ends before them, the process aborts.
        time.sleep(0.2)
        _groups.clear()
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


def sum_numbers(numbers: Sequence[float]) -> list[float]:
    """Return the sums over the processes of numbers, in double precision, without waiting for a GPU."""
    if not _is_distributed():
        return list(numbers)
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total, group=_cpu_group())
    return total.tolist()


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
def all_gather_tensor(tensor: Tensor) -> Tensor:
    """Return the tensors of all processes, which have the same shape, by rank."""
    parts = [torch.empty_like(tensor) for _ in range(world_size())]
    if not _is_distributed():
        return tensor[None]
    # Step counters of optimizers are on the CPU.
    dist.all_gather(parts, tensor.contiguous(), group=_cpu_group() if tensor.device.type == "cpu" else None)
    return torch.stack(parts)


@torch.no_grad()
def broadcast_module_(model: nn.Module) -> None:
    """Copy the parameters and buffers of rank 0 to all processes."""
    if _is_distributed():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, src=0)


def _cpu_group() -> dist.ProcessGroup | None:
    """Return a group whose operations run on CPU tensors; None for the default group."""
    if "gloo" in dist.get_backend_config():
        return None
    if "cpu" not in _groups:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # this process is in a group of all
        _groups["cpu"] = group
    return _groups["cpu"]


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
