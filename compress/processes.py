"""Several processes that prune one model: each has its part of the data, all make the same steps.

Whoever launches them (torchrun) has set up `torch.distributed`; with one process, everything here does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if _several() else 0


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


def mean_gradients_(weights: Sequence[Tensor]) -> None:
    """Replace the gradient of each by its mean; one that no process has stays away."""
    if _several():
        idle = everywhere([w.grad is None for w in weights], weights[0].device)
        used = [w for w, none in zip(weights, idle, strict=True) if not none]
        for w, g in zip(used, mean([torch.zeros_like(w) if w.grad is None else w.grad for w in used]), strict=True):
            w.grad = g


def everywhere(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Which of these hold in every process."""
    if not _several() or not flags:
        return list(flags)
    held = torch.tensor(flags, dtype=torch.uint8, device=device)
    dist.all_reduce(held, dist.ReduceOp.MIN)
    return [bool(flag) for flag in held.tolist()]


def agreed(value: T) -> T:
    """The first process's value, in all."""
    if not _several():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@torch.no_grad()
def agree_(model: nn.Module) -> None:
    """Give every process the first one's parameters and buffers."""
    if _several():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, src=0)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
