"""Replace degenerate parameters by random ones, so that zeros, ones or tiny gates do not hide an error."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from compress.modules import tensor_entries

KEEP_SCALE = (0.5, 4.0)  # a weight is copied and rescaled only if its factor to the usual scale is outside of these
FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
TINY = 0.1  # a vector of smaller values, such as a layer scale, makes its product too small to show an error


def replace_tensors_(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Replace the float tensors of a shared copy by `change(tensor)`; the original model keeps its own."""
    new: dict[int, Tensor] = {}
    for table, key, tensor in tensor_entries(model):
        if not tensor.is_floating_point():
            continue
        if id(tensor) not in new:
            value = change(tensor)
            wrap = isinstance(tensor, nn.Parameter) and value is not tensor
            new[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if wrap else value
        table[key] = new[id(tensor)]
    return model


def perturb_(model: nn.Module) -> nn.Module:
    """Randomize the degenerate tensors of a shared copy: constants, vectors of tiny values, and what is not finite.

    A norm at one, a bias at zero, a residual gate at zero or a layer scale of 1e-5 would hide an error. After tiny
    weights, errors become too small to see; after huge weights, a softmax saturates and hides them. A cut that is exact
    is exact for all values, so other values verify it as well.

    """
    generator = torch.Generator().manual_seed(0)

    def perturbed(value: Tensor) -> Tensor:
        if not value.numel() or value.is_meta or value.layout is not torch.strided or value.dtype not in FLOATS:
            return value
        if not _is_degenerate(value.detach()):
            return _at_usual_scale(value.detach()) if isinstance(value, nn.Parameter) else value
        random = 0.5 + torch.rand(value.shape, generator=generator)
        if not _is_vector(value):  # a weight: signs, and the scale of an initialized layer
            random *= torch.randint(0, 2, value.shape, generator=generator).mul_(2).sub_(1)
            random /= math.sqrt(max(1, value[0].numel()))
        return random.to(value)

    return replace_tensors_(model, perturbed)


def _at_usual_scale(weight: Tensor) -> Tensor:
    """Return a weight, rescaled to the deviation that keeps a signal's scale (He et al. 2015) if it is far from it."""
    if _is_vector(weight):
        return weight
    deviation = math.sqrt(2 * len(weight) / weight.numel())
    factor = deviation / max(float(weight.float().std()), 1e-12)
    return weight if KEEP_SCALE[0] <= factor <= KEEP_SCALE[1] else weight * factor


def _is_degenerate(value: Tensor) -> bool:
    """Return whether a tensor is constant, has NaN or infinities, or is a vector or scalar of values close to zero."""
    flat = value.flatten()
    if not bool(flat.sum().isfinite()):
        return True
    if _is_vector(value) and bool(flat.abs().max() < TINY):
        return True
    if flat.numel() == 1:
        return False  # a temperature, or a gate that is open
    return bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all())


def _is_vector(value: Tensor) -> bool:
    """Return whether at most one dimension has several positions, as in a bias, a norm or a layer scale."""
    return sum(size > 1 for size in value.shape) < 2
