"""Run a model in double precision throughout, also where its code asks for a lower one.

On a CPU, a grouped convolution in double precision is several times slower in the memory format channels_last, which
ConvNeXt uses. It runs on a contiguous copy; its result is in channels_last again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LOWER = frozenset({torch.float32, torch.float16, torch.bfloat16})
CASTS = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})


class _DoublePrecision(TorchFunctionMode):
    """Replace lower float types among the arguments of functions by double: `x.float()`, `softmax(dtype=...)`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CASTS:
            return args[0].double()
        if any(type(arg) is torch.dtype and arg in LOWER for arg in args):
            args = [torch.float64 if type(arg) is torch.dtype and arg in LOWER else arg for arg in args]
        if kwargs and kwargs.get("dtype") in LOWER:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func is torch.conv2d and len(args) > 1 and _is_grouped_in_channels_last(*args[:2]):
            x, weight, *settings = args
            result = func(x.contiguous(), weight.contiguous(), *settings, **(kwargs or {}))
            return result.contiguous(memory_format=torch.channels_last)
        return func(*args, **(kwargs or {}))


def _is_grouped_in_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Return whether a convolution has groups and runs on a CPU in channels_last."""
    if x.ndim != 4 or x.device.type != "cpu" or weight.shape[1] == x.shape[1]:
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Create tensors in double precision and keep them there, for the time of the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _DoublePrecision():
            yield
    finally:
        torch.set_default_dtype(before)
