"""Cut zero rows and columns off the outside of convolution kernels.

Without `first` rows above and `last` rows below, the rest of the kernel reads the input first * dilation further down.
So the padding above decreases by first * dilation and the padding below by last * dilation; it becomes negative where
rows of the input are no longer read. The output keeps its size and its values. If both paddings decrease equally and
stay >= 0, the layer gets a smaller `padding`; otherwise PyTorch's layer pads unevenly in its padding mode "constant".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from compress.errors import PlanError
from compress.modules import CONVOLUTIONS

from .plan_data import AttributeValue

KernelSpans: TypeAlias = Mapping[int, tuple[int, int]]  # dimension of the weight -> kept rows, [start, end)


def smaller_kernel_attributes(name: str, layer: nn.Module, spans: KernelSpans) -> dict[str, AttributeValue]:
    """Return the attributes of a convolution whose kernel is cut to `spans`.

    Args:
        name: of the layer's weight, for errors.
        layer: the convolution.
        spans: the rows to keep, by dimension of the weight.

    Raises:
        PlanError: this is not a convolution with zero padding, or a span does not lie within the kernel.
    """
    padded_by_number = isinstance(layer, CONVOLUTIONS) and not isinstance(layer.padding, str)
    conv: Any = layer
    if not padded_by_number or conv.padding_mode not in ("zeros", "constant"):
        raise PlanError(f"{name}: expected a convolution with zero padding given as a number; got {layer}")
    size, pads = list(conv.kernel_size), [list(p) for p in paddings_of(conv)]
    for dim, (start, end) in spans.items():
        d = dim - 2
        if not (0 <= d < len(size) and 0 <= start < end <= size[d]):
            raise PlanError(f"{name}: expected rows within a kernel of {size}; got {start} to {end} along {dim}")
        pads[d][0] -= start * conv.dilation[d]
        pads[d][1] -= (size[d] - end) * conv.dilation[d]
        size[d] = end - start
    symmetric = all(before == after >= 0 for before, after in pads)
    return {
        "kernel_size": size,
        "padding": [min(p) for p in pads],
        "padding_mode": "zeros" if symmetric else "constant",
        "_reversed_padding_repeated_twice": [side for p in reversed(pads) for side in p],
    }


def paddings_of(conv: Any) -> list[tuple[int, int]]:
    """Return the padding (before, after) of each spatial dimension."""
    sides = conv._reversed_padding_repeated_twice
    if conv.padding_mode == "constant":
        return [(sides[i], sides[i + 1]) for i in range(len(sides) - 2, -1, -2)]
    return [(p, p) for p in conv.padding]


def nonzero_spans(weight: Tensor) -> dict[int, tuple[int, int]]:
    """Return, for each kernel dimension with zero rows on the outside, the span inside them.

    A kernel of zeros has no span.
    """
    spans = {}
    for dim in range(2, weight.ndim):
        other_dims = [d for d in range(weight.ndim) if d != dim]
        nonzero = torch.nonzero(weight.detach().abs().amax(other_dims)).flatten().tolist()
        if nonzero and (span := (nonzero[0], nonzero[-1] + 1)) != (0, weight.shape[dim]):
            spans[dim] = span
    return spans
