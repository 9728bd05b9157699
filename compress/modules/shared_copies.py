"""Copies of a model that share its parameters: they can be run, gated or sliced and need no memory for weights."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from functools import cache
from typing import Any

import torch
from torch import nn

from .parameter_writes import is_written
from .traversal import tensors_of

IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), type)
IMMUTABLE_TYPES = frozenset({*IMMUTABLE, torch.dtype, torch.device})
CONTAINERS = frozenset({dict, OrderedDict, set, list})
COPY_METHODS = ("__deepcopy__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")


def shared_copy(model: nn.Module) -> nn.Module:
    """Copy the modules and buffers and share the parameters, except for those that the model's code writes to.

    Running the copy changes nothing of the model, not even buffers that its code updates. Parameters that it updates
    are known from a run under a `ParameterGuard`.
    """
    memo: dict[int, Any] = {}
    tensors = tensors_of(model).values()
    for p in tensors:
        if isinstance(p, nn.Parameter):
            memo[id(p)] = nn.Parameter(p.detach().clone(), p.requires_grad) if p.is_inference() or is_written(p) else p
    buffers = [b for b in tensors if type(b) is torch.Tensor and b.layout is torch.strided]
    users = Counter(b.untyped_storage().data_ptr() for b in buffers)
    with torch.no_grad():
        for b in buffers:  # faster than deepcopy, which checks for shared memory
            if not b.requires_grad and not vars(b) and users[b.untyped_storage().data_ptr()] == 1 and b.is_contiguous():
                memo[id(b)] = b.clone()
    return _deep_copy(model, memo)


def _deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep-copy a module, faster than `copy.deepcopy` for what every module has: hook tables, numbers and children."""
    if id(module) in memo or _has_copy_method(type(module)):  # type: ignore[arg-type]
        return copy.deepcopy(module, memo)
    module_copy = memo[id(module)] = module.__new__(type(module))
    attributes = vars(module_copy)
    attributes.update(vars(module))
    attributes.pop("_compiled_call_impl", None)  # it would run the original
    for name, value in attributes.items():
        value_type = type(value)
        if value_type in IMMUTABLE_TYPES:
            continue
        if value_type in CONTAINERS and not value:
            attributes[name] = value_type()
        elif name == "_parameters":
            attributes[name] = {key: None if p is None else memo[id(p)] for key, p in value.items()}
        elif name == "_buffers" and all(id(b) in memo for b in value.values()):
            attributes[name] = {key: memo[id(b)] for key, b in value.items()}
        elif name == "_modules":
            attributes[name] = {key: None if child is None else _deep_copy(child, memo) for key, child in value.items()}
        elif not isinstance(value, IMMUTABLE) and not (
            value_type is tuple and all(type(v) in IMMUTABLE_TYPES for v in value)
        ):
            attributes[name] = _copy_attribute(value, memo)
    return module_copy


def _copy_attribute(value: Any, memo: dict[int, Any]) -> Any:
    """Deep-copy an attribute; an activation that it keeps is detached, and what cannot be copied is shared."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a file, a generator, a tensor with a history
        return value.detach().clone() if isinstance(value, torch.Tensor) else value


@cache
def _has_copy_method(module_class: Any) -> bool:
    """Return whether a module class defines how it is copied."""
    return any(getattr(module_class, name, None) is not getattr(nn.Module, name, None) for name in COPY_METHODS)


def trainable_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model whose parameters can be trained.

    The parameters of a scripted module are copied by torch as results of an operator, which no optimizer accepts.
    """
    copied = copy.deepcopy(model)
    for new, old in zip(copied.parameters(), model.parameters(), strict=True):
        if not new.is_leaf:
            new.detach_().requires_grad_(old.requires_grad)
    return copied


def make_teacher(model: nn.Module, device: torch.device, channels_last: bool) -> nn.Module:
    """Return the dense model on a device in eval mode; it shares the weights that are on the device already."""
    on_device = all(t.device == device for t in [*model.parameters(), *model.buffers()])
    teacher = shared_copy(model) if on_device and not channels_last else copy.deepcopy(model).to(device)
    if channels_last:
        teacher.to(memory_format=torch.channels_last)
    return set_eval_flags_(teacher)


def set_eval_flags_(model: nn.Module) -> nn.Module:
    """Set eval mode by the flags alone, because the `eval()` of some libraries does more or returns nothing."""
    for module in model.modules():
        module.training = False
    return model
