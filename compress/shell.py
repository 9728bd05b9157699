"""A model's modules around its own parameters: a copy that can be run, gated or sliced and costs no memory."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from functools import cache
from typing import Any

import torch
from torch import nn

from .walk import tensors_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), type)
FLAT = frozenset({*PLAIN, torch.dtype, torch.device})
EMPTY = frozenset({dict, OrderedDict, set, list})
WAYS = ("__deepcopy__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")  # of a class to copy itself


def shell(model: nn.Module) -> nn.Module:
    """Copy the modules and buffers and share the parameters.

    Running the copy changes nothing of the model, not even buffers that its code updates.
    """
    memo: dict[int, Any] = {}
    tensors = tensors_of(model).values()
    for p in tensors:
        if isinstance(p, nn.Parameter):
            memo[id(p)] = nn.Parameter(p.clone(), p.requires_grad) if p.is_inference() else p
    buffers = [b for b in tensors if type(b) is torch.Tensor and b.layout is torch.strided]
    users = Counter(b.untyped_storage().data_ptr() for b in buffers)
    with torch.no_grad():
        for b in buffers:  # deepcopy would find out with much ado that nothing shares their memory
            if not b.requires_grad and not vars(b) and users[b.untyped_storage().data_ptr()] == 1 and b.is_contiguous():
                memo[id(b)] = b.clone()
    return _copied(model, memo)


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy` without its detours for what every module holds: empty tables of hooks, numbers, children."""
    if id(module) in memo or _own_way(type(module)):  # type: ignore[arg-type]
        return copy.deepcopy(module, memo)
    made = memo[id(module)] = module.__new__(type(module))
    own = vars(made)
    own.update(vars(module))
    own.pop("_compiled_call_impl", None)  # it would run the original
    for name, value in own.items():
        kind = type(value)
        if kind in FLAT:
            continue
        if kind in EMPTY and not value:
            own[name] = kind()
        elif name == "_parameters":
            own[name] = {key: None if p is None else memo[id(p)] for key, p in value.items()}
        elif name == "_buffers" and all(id(b) in memo for b in value.values()):
            own[name] = {key: memo[id(b)] for key, b in value.items()}
        elif name == "_modules":
            own[name] = {key: None if child is None else _copied(child, memo) for key, child in value.items()}
        elif not isinstance(value, PLAIN) and not (kind is tuple and all(type(v) in FLAT for v in value)):
            own[name] = copy.deepcopy(value, memo)
    return made


@cache
def _own_way(kind: Any) -> bool:
    return any(getattr(kind, way, None) is not getattr(nn.Module, way, None) for way in WAYS)


def teacher_of(model: nn.Module, device: torch.device, channels_last: bool) -> nn.Module:
    """The dense model on the device, in eval mode, around its own weights where they are there already."""
    here = all(t.device == device for t in [*model.parameters(), *model.buffers()])
    teacher = shell(model) if here and not channels_last else copy.deepcopy(model).to(device)
    if channels_last:
        teacher.to(memory_format=torch.channels_last)
    return still_(teacher)


def still_(model: nn.Module) -> nn.Module:
    """Eval mode, by the flags alone: some libraries' `eval()` does more, or returns nothing."""
    for module in model.modules():
        module.training = False
    return model
