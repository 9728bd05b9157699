"""Gradients of a small loss on uneven halves of a batch, in micro-batches that may not fit into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.distributed import init_process_group, rank
from compress.training.gradients import GradientComputer


def parameters() -> list[nn.Parameter]:
    """Return two matrices of the loss, one that only the second process uses, and one that nobody uses."""
    random = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(4, 4, generator=random, dtype=torch.float64)) for _ in range(4)]


def samples(device_rank: int | None = None) -> Tensor:
    """Return eight samples of the first process and six of the second, or those of all."""
    x = torch.randn(14, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x if device_rank is None else x[:8] if device_rank == 0 else x[8:]


def per_sample_losses(x: Tensor, weights: list[nn.Parameter], second: bool) -> Tensor:
    """Return the losses of samples of the first or the second process."""
    y = (x @ weights[0]).tanh() @ weights[1]
    return (y @ weights[2] if second else y).square().sum(1)


class OutOfMemoryInBackward(torch.autograd.Function):
    """The identity, whose backward pass needs too much memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def reduced_gradients(folder: Path) -> dict[str, Any]:
    """Return gradients of two processes, the second of which has too little memory for more than four samples."""
    init_process_group(cpu=True)
    weights, second = parameters(), rank() == 1
    results: dict[str, Any] = {}
    for case, limit, parts in (("whole", 8, 1), ("micro", 8, 3), ("forward", 4, 1), ("backward", 4, 1)):
        compute = GradientComputer()
        compute.num_micro_batches = parts

        def terms(x: Tensor, case: str = case, limit: int = limit) -> dict[str, Tensor]:
            small = second and len(x) > limit
            if small and case == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            # Fails after the gradients of the later matrices have been reduced.
            hidden = OutOfMemoryInBackward.apply(x @ weights[0]) if small and case == "backward" else x @ weights[0]
            y = hidden.tanh() @ weights[1]
            return {"task": (y @ weights[2] if second else y).square().sum(1).mean()}

        with compute.training():
            for _ in range(3):
                found = compute.gradients(terms, samples(rank()), weights)
        results[case] = {
            "gradients": [g.flatten().tolist() for g in found.gradients],
            "unused": found.unused,
            "loss": float(found.loss),
            "parts": compute.num_micro_batches,
            "clean": all(w.grad is None and not w._post_accumulate_grad_hooks for w in weights),
        }
    return results


def overflowing_gradients(folder: Path) -> dict[str, Any]:
    """Return gradients in half precision that overflow in the second process only."""
    init_process_group(cpu=True)
    weight = nn.Parameter(torch.ones(2))
    compute = GradientComputer(precision="fp16")

    def terms(x: Tensor) -> dict[str, Tensor]:
        return {"task": (weight.half() * x.half()).float().sum() * (4.0 if rank() else 1.0)}

    found = compute.gradients(terms, torch.ones(1, 2), [weight])
    return {"gradient": found.gradients[0].tolist(), "scale": compute.loss_scale}
