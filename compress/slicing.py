"""slice_: the only code that changes a shape."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .attention import take_
from .branches import remove_
from .gates import scores
from .plan import Plan, PlanError
from .walk import modules_of, tensors_of


@torch.no_grad()
def slice_(
    model: nn.Module, plan: Plan, *, optimizer: torch.optim.Optimizer | None = None, anew: Collection[str] = ()
) -> nn.Module:
    """Cut what the plan drops out of every tensor, in place; gradients and optimiser state are cut along.

    Dtype, device, memory format, `requires_grad` and ties between parameters are kept. Tensors named in `anew` get
    their shape and no numbers: they are given others.

    Raises:
        PlanError: the plan was made for another model; nothing was changed.
    """
    tensors = plan.check(model)
    if scores(model):
        raise PlanError("the model carries gates: call compress.gates.fold_(model) before slicing")
    for path in plan.forms:
        take_(model.get_submodule(path))
    remove_(model, plan.gone)
    modules = modules_of(model)
    left = {id(t) for t in (tensors_of(model) if plan.gone or optimizer is not None else tensors).values()}
    if optimizer is not None:
        _forget(optimizer, left)
    new: dict[int, Tensor] = {}
    old: dict[int, Tensor] = {}  # keeps the ids above alive
    for name, dims in plan.slices.items():
        tensor = tensors[name]
        if id(tensor) not in left:
            continue
        small = _blank(tensor, plan.shape_of(name, tensor.shape)) if name in anew else _cut(tensor, dims)
        if isinstance(tensor, nn.Parameter):
            small = nn.Parameter(small, requires_grad=tensor.requires_grad)
            if tensor.grad is not None:
                small.grad = _cut(tensor.grad, dims)
            if optimizer is not None:
                _cut_state(optimizer, tensor, small, dims)
        new[id(tensor)], old[id(tensor)] = small, tensor
    for module in modules.values():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for key, tensor in table.items():
                if tensor is not None and id(tensor) in new:
                    table[key] = new[id(tensor)]
    for path, values in plan.attributes.items():
        for attribute, value in values.items() if path in modules and path not in plan.gone else ():
            setattr(modules[path], attribute, tuple(value) if isinstance(value, list) else value)
    for path, size in plan.biases.items():
        _give_bias(modules[path], size, plan.slices.get(f"{path}.weight", {}).get(0))
    scale_(model, plan)
    return model


@torch.no_grad()
def scale_(model: nn.Module, plan: Plan) -> None:
    """Multiply what is left by the plan's factors; gradients are divided by them."""
    tensors = tensors_of(model, aliases=True) if plan.scales else {}
    for name, dim, index, factor in plan.scales:
        if (small := tensors.get(name)) is None:
            continue  # it went with its branch
        kept, meant = plan.slices[name][dim], np.zeros(plan.shapes[name][dim], dtype=bool)
        meant[index] = True
        along = small.new_ones(len(kept))
        along[torch.as_tensor(np.flatnonzero(meant[kept]), device=small.device)] = factor
        along = along.view([-1 if d == dim else 1 for d in range(small.ndim)])
        small.mul_(along)
        if small.grad is not None:
            small.grad.div_(along)


def _give_bias(module: nn.Module, size: int, rows: Any) -> None:
    """A bias of zeros where the dense layer has none; one that compensation made is cut like the rows it belongs to."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    if isinstance(bias, Tensor) and len(bias) != size:
        value = _cut(bias, {0: rows})
    else:
        value = bias.detach() if isinstance(bias, Tensor) else weight.new_zeros(size)
    module.bias = nn.Parameter(value, requires_grad=weight.requires_grad)


def _cut(tensor: Tensor, dims: dict[int, Any]) -> Tensor:
    out = tensor.detach()
    if dims.keys() == {0, 1} and tensor.ndim > 2 and out.is_contiguous() and tensor.shape[2:].numel() > 1:
        rows, columns = (torch.as_tensor(dims[d], device=tensor.device) for d in (0, 1))
        kernels = (rows[:, None] * tensor.shape[1] + columns).flatten()  # both at once: no rows to copy twice
        return out.flatten(0, 1).index_select(0, kernels).view(len(rows), len(columns), *tensor.shape[2:])
    for dim, kept in sorted(dims.items()):  # whole rows first: that is the cheap way
        out = out.index_select(dim, torch.as_tensor(kept, device=tensor.device))
    return in_format(out, tensor)


def _blank(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return in_format(torch.empty(shape, dtype=tensor.dtype, device=tensor.device), tensor)


def in_format(tensor: Tensor, other: Tensor) -> Tensor:
    """The same numbers, with the channels last in memory if another tensor of the same rank has them there."""
    for layout, rank in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if other.ndim == rank and not other.is_contiguous() and other.is_contiguous(memory_format=layout):
            return tensor.contiguous(memory_format=layout)
    return tensor.contiguous()


def _forget(optimizer: torch.optim.Optimizer, left: set[int]) -> None:
    """What is out of the network is no longer trained."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in left:
                optimizer.state.pop(p, None)
        group["params"] = [p for p in group["params"] if id(p) in left]


def _cut_state(optimizer: torch.optim.Optimizer, old: Tensor, small: nn.Parameter, dims: dict[int, Any]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [small if p is old else p for p in group["params"]]
    state = optimizer.state.pop(old, None)
    if state is not None:
        optimizer.state[small] = {
            key: _cut(value, dims) if isinstance(value, Tensor) and value.shape == old.shape else value
            for key, value in state.items()
        }
