"""Gradients of scores without computing the gradients of weights.

A gate scales the input columns of a layer: y = (W diag(s)) x. Autograd computes the gradient of s from that of the
gated weight, which is as large as W. If W is frozen it is cheaper to compute it from the input: with g = dL/dy,

    dL/d(s x) = W^T g,  dL/dx = s dL/d(s x),  dL/ds_i = sum over samples and positions of x_i (W^T g)_i

which costs no more than dL/dx and stores nothing beyond what the layer stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.modules import is_plain_layer
from compress.surgery import Gate


@contextmanager
def score_only_backward(model: nn.Module) -> Iterator[None]:
    """Compute the gradients of scores from the inputs of frozen layers inside this context.

    The outputs are the same. Layers with their own forward code are left as they are.
    """
    patched = []
    for module in model.modules():
        gate = _only_gate(module)
        if gate is not None and _is_frozen_plain_layer(module):
            vars(module)["forward"] = partial(_gated_forward, module, gate)
            patched.append(module)
    try:
        yield
    finally:
        for module in patched:
            del vars(module)["forward"]


def _only_gate(module: nn.Module) -> Gate | None:
    """Return the gate on the input columns of the weight, if it is the module's only parametrization."""
    chains: Any = getattr(module, "parametrizations", {})
    if list(chains) != ["weight"] or len(chains["weight"]) != 1:
        return None
    (gate,) = chains["weight"]
    return gate if isinstance(gate, Gate) and gate.dim == 1 else None


def _is_frozen_plain_layer(module: Any) -> bool:
    """Return whether this is a plain linear layer or zero-padded convolution whose weight and bias are frozen."""
    if not is_plain_layer(module):
        return False
    if not isinstance(module, nn.Linear) and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
        return False
    tensors = (module.parametrizations.weight.original, module.bias)
    return not any(t.requires_grad for t in tensors if t is not None)


def _gated_forward(module: Any, gate: Gate, x: Tensor) -> Tensor:
    weight = module.parametrizations.weight.original
    spatial_dims = weight.ndim - 2
    if x.ndim != weight.ndim if spatial_dims else x.ndim < 2:  # an input without a batch dimension
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    settings = (module.stride, module.padding, module.dilation) if spatial_dims else None
    outputs: Tensor = _GatedLayer.apply(x, gate.factors(weight.dtype), weight, module.bias, settings)
    return outputs


class _GatedLayer(torch.autograd.Function):
    """Linear layer or convolution (W diag(s)) x + b, for frozen W and b; `settings` are those of a convolution."""

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
        scaled_input_gradient = _scaled_input_gradient(gradient, x, weight.to(gradient.dtype), ctx.settings)  # W^T g
        channel_dim = 1 if ctx.settings is not None else x.ndim - 1
        factor_gradient = input_gradient = None
        if ctx.needs_input_grad[1]:
            contiguous = x.is_contiguous() and scaled_input_gradient.is_contiguous()
            if ctx.settings is not None and contiguous and x.dtype == scaled_input_gradient.dtype:
                products = torch.linalg.vecdot(scaled_input_gradient.flatten(2), x.flatten(2))
                factor_gradient = products.sum(0, dtype=factor.dtype)
            else:
                others = [d for d in range(x.ndim) if d != channel_dim]
                factor_gradient = (scaled_input_gradient * x).sum(others, dtype=factor.dtype)
        if ctx.needs_input_grad[0]:
            shape = [-1 if d == channel_dim else 1 for d in range(x.ndim)]
            input_gradient = scaled_input_gradient.mul_(factor.to(scaled_input_gradient.dtype).view(shape))
        return input_gradient, factor_gradient, None, None, None


def _scaled_input_gradient(gradient: Tensor, x: Tensor, weight: Tensor, settings: Any) -> Tensor:
    """Return dL/d(s x) = W^T g."""
    if settings is None:
        return gradient @ weight
    stride, padding, dilation = settings
    output_padding = [0] * len(stride)
    gradients = torch.ops.aten.convolution_backward(
        gradient,
        x.to(gradient.dtype),
        weight,
        None,  # sizes of the bias
        stride,
        padding,
        dilation,
        False,  # not transposed
        output_padding,
        1,  # groups
        [True, False, False],  # the gradient of the input only
    )
    return gradients[0]  # type: ignore[no-any-return]
