"""Run a model in double precision throughout, also where its code asks for a lower one."""

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
        return func(*args, **(kwargs or {}))


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
