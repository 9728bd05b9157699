"""compensate_: what is dropped had a mean; fold it into the biases of those who read it.

For a reader y = W x + b and dropped inputs d with mean m_d:  b <- b + sum_d W[:, d] m_d  (summed over the kernel).
Exact for a constant input read by a linear layer or an unpadded convolution; at padded borders it is an approximation.

The mean is known in closed form behind a batch norm with shift beta and scale gamma: beta itself, or behind a ReLU
(Gaussian input) beta * Phi(beta / |gamma|) + |gamma| * phi(beta / |gamma|). Elsewhere it is measured on batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .groups import Groups
from .plan import Plan
from .tracing import mode


@torch.no_grad()
def compensate_(model: nn.Module, groups: Groups, plan: Plan, batches: Iterable[Any] = ()) -> list[str]:
    """Add what the dropped dimensions contribute on average to the readers' biases, before the model is sliced.

    A bias is created where a reader has none, and noted in the plan. `batches` are inputs to measure means on; they
    are needed only by readers that do not stand behind a batch norm. Returns the names of the readers compensated.
    """
    modules = dict(model.named_modules())
    readers = {}
    for name, dims in plan.reads.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and dims == [1] and _supported(modules[path]):
            readers[path] = name
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    means = {p: m for p, n in readers.items() if (m := _closed_form(groups.norms.get(n), tensors)) is not None}
    means |= _measured(model, [p for p in readers if p not in means], batches)
    for path, mean in means.items():
        module, name = modules[path], readers[path]
        weight = tensors[name]
        dropped = np.setdiff1d(np.arange(weight.shape[1]), plan.slices[name][1])
        gone = torch.as_tensor(dropped, device=weight.device)
        columns = weight.index_select(1, gone).flatten(2).sum(2) if weight.ndim > 2 else weight.index_select(1, gone)
        shift = columns.double() @ mean.double()[gone]
        if module.bias is None:
            module.bias = nn.Parameter(weight.new_zeros(weight.shape[0]), requires_grad=weight.requires_grad)
            rows = plan.slices[name].get(0)
            plan.biases[path] = len(rows) if rows is not None else weight.shape[0]
        bias = module.bias
        assert isinstance(bias, Tensor)
        bias += shift.to(bias.dtype)
    return sorted(means)


def _supported(module: nn.Module) -> bool:
    plain = isinstance(module, nn.modules.conv._ConvNd) and not module.transposed and module.groups == 1
    return plain or isinstance(module, nn.Linear)


def _closed_form(norm: tuple[str, str] | None, tensors: dict[str, Tensor]) -> Tensor | None:
    """The mean of a batch norm's output, or of what a ReLU makes of it."""
    if norm is None:
        return None
    scale, shift = tensors[norm[0]].double().abs(), tensors.get(norm[0].removesuffix("weight") + "bias")
    if shift is None:
        return None
    shift = shift.double()
    if not norm[1]:
        return shift
    mean = _rectified(shift, scale)
    return mean if norm[1] == "relu" else mean - _rectified(shift - 6, scale)


def _rectified(shift: Tensor, scale: Tensor) -> Tensor:
    """E[max(0, shift + scale * z)], z normal."""
    z = shift / scale.clamp_min(1e-30)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    mean: Tensor = shift * torch.special.ndtr(z) + scale * density
    return mean


def _measured(model: nn.Module, paths: list[str], batches: Iterable[Any]) -> dict[str, Tensor]:
    """The mean input of each module over the batches, per channel."""
    from .discover import as_call

    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    modules = dict(model.named_modules())

    def watch(path: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach().double()
            rows = x.reshape(-1, x.shape[-1]) if isinstance(module, nn.Linear) else x.transpose(0, 1).flatten(1).T
            sums[path] = sums.get(path, torch.zeros(rows.shape[1], dtype=rows.dtype, device=rows.device)) + rows.sum(0)
            counts[path] = counts.get(path, 0) + rows.shape[0]

        return hook

    hooks = [modules[path].register_forward_pre_hook(watch(path)) for path in paths]
    try:
        with mode(model, training=False):
            for batch in batches if paths else ():
                args, kwargs = as_call(batch)
                model(*args, **kwargs)
    finally:
        for h in hooks:
            h.remove()
    return {path: total / counts[path] for path, total in sums.items()}
