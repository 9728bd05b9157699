"""Replacements of costly operators that return zeros: tracing needs shapes, not numbers.

Each function has the name and arguments of an ATen operator. It returns zeros of the shape, type and memory format that
the operator would return, or None for invalid or unusual arguments; then the operator itself is run, and raises its
own error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

SHAPE_ONLY: dict[str, Callable[..., Any]] = {}


def shape_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as the replacement of the operator of the same name."""
    SHAPE_ONLY[function.__name__] = function
    return function


def _same_type(*tensors: Tensor | None) -> bool:
    types = {(t.dtype, t.device, t.layout) for t in tensors if t is not None}
    return len(types) == 1 and next(iter(types))[2] is torch.strided


def _output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _per_dimension(value: Sequence[int], count: int) -> Sequence[int]:
    return value if len(value) == count else list(value) * count


def _output_format(*tensors: Tensor) -> torch.memory_format:
    """Return the memory format of a convolution's output: channels last if one of its inputs is."""
    for t in tensors:
        if t.ndim == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last):
            return torch.channels_last
    return torch.contiguous_format


@shape_only
def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor | None:
    """Return zeros in the shape of a convolution; None if the arguments are unusual."""
    num_spatial = weight.ndim - 2
    if transposed or num_spatial < 1 or x.ndim != weight.ndim or not x.numel() or not _same_type(x, weight, bias):
        return None
    is_valid = x.shape[1] == weight.shape[1] * groups and len(weight) % groups == 0
    if not is_valid or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    options = (_per_dimension(v, num_spatial) for v in (stride, padding, dilation))
    sizes = [_output_size(n, k, *rest) for n, k, *rest in zip(x.shape[2:], weight.shape[2:], *options, strict=True)]
    if min(sizes) < 1:
        return None
    shape = (len(x), len(weight), *sizes)
    return x.new_empty(shape).zero_() if x.ndim != 4 else _zeros(x, shape, _output_format(x, weight))


def _zeros(like: Tensor, shape: tuple[int, ...], layout: torch.memory_format) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout).zero_()


@shape_only
def max_pool2d_with_indices(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """Return zeros in the shapes of max pooling and its indices; None if the arguments are unusual."""
    if ceil_mode or x.ndim != 4 or not x.numel() or not x.is_contiguous():
        return None
    per_dimension = [_per_dimension(v, 2) for v in (kernel, stride or kernel, padding, dilation)]
    sizes = [_output_size(n, *options) for n, *options in zip(x.shape[2:], *per_dimension, strict=True)]
    if min(sizes) < 1 or any(2 * p > k for p, k in zip(per_dimension[2], per_dimension[0], strict=True)):
        return None
    out = x.new_zeros((*x.shape[:2], *sizes))
    return out, torch.zeros_like(out, dtype=torch.int64)


@shape_only
def mm(a: Tensor, b: Tensor) -> Tensor | None:
    """Return zeros in the shape of a matrix product; None if the arguments are unusual."""
    is_valid = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0] and _same_type(a, b)
    return a.new_zeros(a.shape[0], b.shape[1]) if is_valid else None


@shape_only
def addmm(bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor | None:
    """Return zeros in the shape of a matrix product with a bias; None if the arguments are unusual."""
    out = mm(a, b)
    return out if out is not None and bias.shape in (out.shape[1:], out.shape) and _same_type(bias, a) else None


@shape_only
def bmm(a: Tensor, b: Tensor) -> Tensor | None:
    """Return zeros in the shape of a batch of matrix products; None if the arguments are unusual."""
    is_valid = a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1] and _same_type(a, b)
    return a.new_zeros(*a.shape[:2], b.shape[2]) if is_valid else None
