"""Smaller kernels: a convolution whose outer rows or columns are zero, without them.

With `first` rows gone above and `last` below, the rest reads the input first * dilation further down. So padding above
falls by first * dilation and below by last * dilation, to below zero where rows of the input are no longer read; the
output is as large as before, and equal. Where both sides fall alike and not below zero the layer has a smaller
`padding`; else torch's own layer pads unevenly if its mode is to pad with a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .plan import PlanError

Kernel = Mapping[int, tuple[int, int]]  # dimension of the weight -> the rows that are left, from and up to


def smaller(name: str, layer: Any, left: Kernel) -> dict[str, Any]:
    """The attributes that a convolution has with these rows and columns left.

    Raises:
        PlanError: it is no convolution that can be cut in this way, or nothing would be left.
    """
    plain = isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and not isinstance(layer.padding, str)
    if not plain or layer.padding_mode not in ("zeros", "constant"):
        raise PlanError(f"{name}: kernels are cut from convolutions with a number as padding, of zeros; got {layer}")
    size, pads = list(layer.kernel_size), [list(p) for p in paddings(layer)]
    for dim, (start, end) in left.items():
        d = dim - 2
        if not (0 <= d < len(size) and 0 <= start < end <= size[d]):
            raise PlanError(f"{name}: expected rows within a kernel of {size}; got {start} to {end} along {dim}")
        pads[d][0] -= start * layer.dilation[d]
        pads[d][1] -= (size[d] - end) * layer.dilation[d]
        size[d] = end - start
    even = all(a == b >= 0 for a, b in pads)
    return {
        "kernel_size": size,
        "padding": [min(p) for p in pads],
        "padding_mode": "zeros" if even else "constant",
        "_reversed_padding_repeated_twice": [side for p in reversed(pads) for side in p],
    }


def paddings(layer: Any) -> list[tuple[int, int]]:
    """Before and after, for each dimension."""
    sides = layer._reversed_padding_repeated_twice
    if layer.padding_mode == "constant":
        return [(sides[i], sides[i + 1]) for i in range(len(sides) - 2, -1, -2)]
    return [(p, p) for p in layer.padding]


def spans(weight: Tensor) -> dict[int, tuple[int, int]]:
    """Along each dimension of a kernel that has zero rows outside, what lies inside them; a kernel of zeros is left."""
    found = {}
    for dim in range(2, weight.ndim):
        others = [d for d in range(weight.ndim) if d != dim]
        used = torch.nonzero(weight.detach().abs().amax(others)).flatten().tolist()
        if used and (span := (used[0], used[-1] + 1)) != (0, weight.shape[dim]):
            found[dim] = span
    return found
