"""The gradient of scores without that of weights.

A gate scales the columns W of the layer that reads x: y = (W diag(s)) x. By way of W the gradient of s needs that of
all of W. Where W is frozen it is cheaper to go by way of x: with g = dL/dy,

    dL/d(s x) = W^T g,  dL/dx = s dL/d(s x),  dL/ds_i = sum over all places of x_i (W^T g)_i

which costs no more than dL/dx, and stores nothing that the layer would not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gates import Gate

CONVOLUTIONS: tuple[type[Any], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@contextmanager
def lean(model: nn.Module) -> Iterator[None]:
    """Inside, frozen layers with a gate on what they read give the scores their gradient by way of it.

    The function is the same. Layers whose own code does something else with their weight are left as they are, and so
    are weights that other code reads.
    """
    changed = []
    for module in model.modules():
        gate = _only_gate(module)
        if gate is not None and _plain(module) and "forward" not in vars(module):
            vars(module)["forward"] = partial(_read, module, gate)
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del vars(module)["forward"]


def _only_gate(module: nn.Module) -> Gate | None:
    """The gate on the columns of a weight that has no other parametrization."""
    chains: Any = getattr(module, "parametrizations", {})
    if list(chains) != ["weight"] or len(chains["weight"]) != 1:
        return None
    (gate,) = chains["weight"]
    return gate if isinstance(gate, Gate) and gate.dim == 1 else None


def _plain(module: Any) -> bool:
    """Whether it is a frozen linear layer or convolution that does what torch's own does."""
    if type(module).forward is not nn.Linear.forward:
        same = [k for k in CONVOLUTIONS if type(module).forward is k.forward]
        if not same or type(module)._conv_forward is not same[0]._conv_forward:
            return False
        if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
            return False
    tensors = (module.parametrizations.weight.original, module.bias)
    return not any(t.requires_grad for t in tensors if t is not None)


def _read(module: Any, gate: Gate, x: Tensor) -> Tensor:
    weight = module.parametrizations.weight.original
    kernel = weight.ndim - 2
    if x.ndim != weight.ndim if kernel else x.ndim < 2:  # an image or a vector without a batch
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    settings = (module.stride, module.padding, module.dilation) if kernel else None
    read: Tensor = _Read.apply(x, gate.factor(weight.dtype), weight, module.bias, settings)
    return read


class _Read(torch.autograd.Function):
    """(W diag(s)) x + b, for a frozen W and b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, weight: Tensor, bias: Tensor | None, settings: Any) -> Tensor:
        ctx.save_for_backward(x, factor, weight)
        ctx.settings = settings
        scaled = weight * factor.view(-1, *[1] * (weight.ndim - 2))
        if settings is None:
            return F.linear(x, scaled, bias)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3]
        return convolve(x, scaled, bias, *settings)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, factor, weight = ctx.saved_tensors
        of_read = _transposed(gradient, x, weight.to(gradient.dtype), ctx.settings)  # W^T g
        where = 1 if ctx.settings is not None else x.ndim - 1
        others = [d for d in range(x.ndim) if d != where]
        of_factor = None
        if ctx.needs_input_grad[1]:
            if ctx.settings is not None and x.is_contiguous() and of_read.is_contiguous() and x.dtype == of_read.dtype:
                of_factor = torch.linalg.vecdot(of_read.flatten(2), x.flatten(2)).sum(0, dtype=factor.dtype)
            else:
                of_factor = (of_read * x).sum(others, dtype=factor.dtype)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = of_read.mul_(factor.to(of_read.dtype).view([-1 if d == where else 1 for d in range(x.ndim)]))
        return of_x, of_factor, None, None, None


def _transposed(gradient: Tensor, x: Tensor, weight: Tensor, settings: Any) -> Tensor:
    if settings is None:
        return gradient @ weight
    stride, padding, dilation = settings
    none = [0] * len(stride)
    found = torch.ops.aten.convolution_backward(
        gradient, x.to(gradient.dtype), weight, None, stride, padding, dilation, False, none, 1, [True, False, False]
    )
    return found[0]  # type: ignore[no-any-return]
