"""Unwrap models from DataParallel, DDP and torch.compile, and check that they can be pruned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from compress.errors import NotReady

from .traversal import modules_of, tensors_of


def unwrap_model(model: Any) -> nn.Module:
    """Return the model inside DataParallel, DDP and torch.compile, which change the names of its modules.

    Raises:
        NotReady: It is not a model, or one that cannot be copied and cut.
    """
    unwrapped = _unwrap(model, "model")
    if isinstance(unwrapped, torch.jit.ScriptModule):
        raise NotReady("model: TorchScript cannot be cut; pass the Python module that it was compiled from")
    for name, module in modules_of(unwrapped).items():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                raise NotReady(
                    f"model: {name}.{key} is computed from other tensors, which copies and cuts would not update. "
                    "Make it a parameter again with torch.nn.utils.prune.remove, torch.nn.utils.remove_weight_norm or "
                    "detach()"
                )
    return unwrapped


def unwrap_teacher(teacher: Any) -> nn.Module:
    """Return the model inside DataParallel, DDP and torch.compile; it only has to run, so it may be TorchScript.

    Raises:
        NotReady: It is not a model, or its tensors have no values.
    """
    return _unwrap(teacher, "teacher")


def _unwrap(model: Any, argument: str) -> nn.Module:
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    if not isinstance(model, nn.Module):
        raise NotReady(f"{argument}: expected a torch.nn.Module; got {type(model).__name__}")
    for name, tensor in tensors_of(model).items():
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise NotReady(f"{argument}: {name} has no shape yet (a lazy module); run the model on one batch first")
        if tensor.is_meta:
            raise NotReady(f"{argument}: {name} is on the meta device and has no values; load the weights first")
    return model
