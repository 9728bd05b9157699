"""Results of costly operators without their arithmetic: following a model takes shapes, not numbers.

A function here gets the operator's arguments and returns zeros of the shape, type and memory format that the operator
would return, or None where the call is not of the plain kind: then the operator is run, and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

IDLE: dict[str, Callable[..., Any]] = {}


def idle(function: Callable[..., Any]) -> Callable[..., Any]:
    IDLE[function.__name__] = function
    return function


def _alike(*tensors: Tensor | None) -> bool:
    kinds = {(t.dtype, t.device, t.layout) for t in tensors if t is not None}
    return len(kinds) == 1 and next(iter(kinds))[2] is torch.strided


def _span(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _each(value: Sequence[int], count: int) -> Sequence[int]:
    return value if len(value) == count else list(value) * count


def _format(*tensors: Tensor) -> torch.memory_format:
    """What a convolution of these returns: the channels last if they are so in one of them."""
    for t in tensors:
        if t.ndim == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last):
            return torch.channels_last
    return torch.contiguous_format


@idle
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
    count = weight.ndim - 2
    if transposed or count < 1 or x.ndim != weight.ndim or not x.numel() or not _alike(x, weight, bias):
        return None
    fits = x.shape[1] == weight.shape[1] * groups and len(weight) % groups == 0
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    steps = (_each(v, count) for v in (stride, padding, dilation))
    sizes = [_span(n, k, *by) for n, k, *by in zip(x.shape[2:], weight.shape[2:], *steps, strict=True)]
    if min(sizes) < 1:
        return None
    shape = (len(x), len(weight), *sizes)
    return x.new_empty(shape).zero_() if x.ndim != 4 else _zeros(x, shape, _format(x, weight))


def _zeros(like: Tensor, shape: tuple[int, ...], layout: torch.memory_format) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout).zero_()


@idle
def max_pool2d_with_indices(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor] | None:
    if ceil_mode or x.ndim != 4 or not x.numel() or not x.is_contiguous():
        return None
    by = [_each(v, 2) for v in (kernel, stride or kernel, padding, dilation)]
    sizes = [_span(n, *one) for n, *one in zip(x.shape[2:], *by, strict=True)]
    if min(sizes) < 1 or any(2 * p > k for p, k in zip(by[2], by[0], strict=True)):
        return None
    out = x.new_zeros((*x.shape[:2], *sizes))
    return out, torch.zeros_like(out, dtype=torch.int64)


@idle
def mm(a: Tensor, b: Tensor) -> Tensor | None:
    plain = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0] and _alike(a, b)
    return a.new_zeros(a.shape[0], b.shape[1]) if plain else None


@idle
def addmm(bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor | None:
    out = mm(a, b)
    return out if out is not None and bias.shape in (out.shape[1:], out.shape) and _alike(bias, a) else None


@idle
def bmm(a: Tensor, b: Tensor) -> Tensor | None:
    plain = a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1] and _alike(a, b)
    return a.new_zeros(*a.shape[:2], b.shape[2]) if plain else None
