"""A model's modules around its own parameters: a copy that can be run, gated or sliced and costs no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def shell(model: nn.Module, change: Callable[[Tensor], Tensor] = lambda t: t) -> nn.Module:
    """Copy the modules and buffers; parameters are shared, or what `change` makes of them.

    Running the copy changes nothing of the model, not even buffers that its code updates.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        value = change(parameter.detach())
        value = value.clone() if value.is_inference() else value  # a normal tensor, which gates can hold
        untouched = value.data_ptr() == parameter.data_ptr() and value.dtype == parameter.dtype
        memo[id(parameter)] = parameter if untouched else nn.Parameter(value, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        value = change(buffer.detach())
        memo[id(buffer)] = value.clone() if value.data_ptr() == buffer.data_ptr() else value
    return copy.deepcopy(model, memo)
