"""Slice a model by a plan: the only code that changes the shape of a tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from compress.errors import PlanError
from compress.graph import Index
from compress.modules import modules_of, select_channels_, tensor_entries, tensors_of, use_compact_form_

from .branches import remove_modules_
from .gates import scores_of
from .operations import apply_operations_, with_operations
from .plan_data import PlanData
from .plan_validation import check_plan


@torch.no_grad()
def slice_(
    model: nn.Module,
    plan: PlanData,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    uninitialized: Collection[str] = (),
) -> nn.Module:
    """Remove the dropped dimensions from every tensor, in place, with gradients and optimizer state.

    Dtype, device, memory format, `requires_grad` and ties between parameters are preserved.

    Args:
        model: the dense model.
        plan: what to keep.
        optimizer: its parameters and their state are sliced too.
        uninitialized: names of tensors whose values the caller fills in; they only get their new shape.

    Raises:
        PlanError: the plan was made for another model, or the model has gates; the model is unchanged.
    """
    tensors = check_plan(plan, with_operations(model, plan))  # before anything changes
    if scores_of(model):
        raise PlanError("the model has gates: call compress.surgery.fold_(model) before slicing")
    if plan.choices or plan.network:
        apply_operations_(model, plan)
        tensors = check_plan(plan, model)
    for path in plan.compact_forms:
        use_compact_form_(model.get_submodule(path))
    remove_modules_(model, plan.removed_modules, plan.slices)
    modules = modules_of(model)
    removes = plan.removed_modules or plan.choices or plan.network
    remaining_tensors = tensors_of(model) if removes or optimizer is not None else tensors
    remaining = {id(tensor) for tensor in remaining_tensors.values()}
    if optimizer is not None:
        _drop_removed_parameters_(optimizer, remaining)
    sliced_by_id: dict[int, Tensor] = {}
    originals: dict[int, Tensor] = {}  # keeps the ids above valid
    for name, dims in plan.slices.items():
        tensor = tensors[name]
        if id(tensor) not in remaining:
            continue
        if name in uninitialized:
            sliced = _empty_like(tensor, plan.shape_of(name, tensor.shape))
        else:
            sliced = _select_kept(tensor, dims)
        if isinstance(tensor, nn.Parameter):
            sliced = nn.Parameter(sliced, requires_grad=tensor.requires_grad)
            if tensor.grad is not None:
                sliced.grad = _select_kept(tensor.grad, dims)
            if optimizer is not None:
                _slice_optimizer_state_(optimizer, tensor, sliced, dims)
        sliced_by_id[id(tensor)], originals[id(tensor)] = sliced, tensor
    for table, key, tensor in tensor_entries(model):
        if id(tensor) in sliced_by_id:
            table[key] = sliced_by_id[id(tensor)]
    for path, values in plan.attributes.items():
        for attribute, value in values.items() if path in modules and path not in plan.removed_modules else ():
            is_tuple = isinstance(value, list) and not isinstance(getattr(modules[path], attribute, None), list)
            setattr(modules[path], attribute, tuple(value) if is_tuple else value)  # type: ignore[arg-type]
    for path, channels in plan.selections.items():
        if path not in plan.removed_modules:
            select_channels_(modules[path], torch.as_tensor(channels))
    for path, size in plan.biases.items():
        _set_bias_(modules[path], size, plan.slices.get(f"{path}.weight", {}).get(0))
    rescale_(model, plan)
    return model


@torch.no_grad()
def rescale_(model: nn.Module, plan: PlanData) -> None:
    """Multiply a sliced model's tensors by the plan's factors; divide gradients by them."""
    tensors = tensors_of(model, aliases=True) if plan.scales else {}
    for name, dim, positions, factor in plan.scales:
        if (sliced := tensors.get(name)) is None:
            continue  # removed with its branch
        kept, is_rescaled = plan.slices[name][dim], np.zeros(plan.shapes[name][dim], dtype=bool)
        is_rescaled[positions] = True
        factors = sliced.new_ones(len(kept))
        factors[torch.as_tensor(np.flatnonzero(is_rescaled[kept]), device=sliced.device)] = factor
        factors = factors.view([-1 if d == dim else 1 for d in range(sliced.ndim)])
        sliced.mul_(factors)
        if sliced.grad is not None:
            sliced.grad.div_(factors)


def _set_bias_(module: nn.Module, size: int, kept_rows: Index | None) -> None:
    """Give a layer a bias of this size: zeros, or the kept part of the bias that compensation has added."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    if isinstance(bias, Tensor) and len(bias) != size:
        assert kept_rows is not None
        value = _select_kept(bias, {0: kept_rows})
    else:
        value = bias.detach() if isinstance(bias, Tensor) else weight.new_zeros(size)
    module.bias = nn.Parameter(value, requires_grad=weight.requires_grad)


def _select_kept(tensor: Tensor, kept: Mapping[int, Index]) -> Tensor:
    """Return the kept positions along each dimension, in the tensor's memory format."""
    out = tensor.detach()
    if kept.keys() == {0, 1} and tensor.ndim > 2 and out.is_contiguous() and tensor.shape[2:].numel() > 1:
        rows, columns = (torch.as_tensor(kept[d], device=tensor.device) for d in (0, 1))
        kernels = (rows[:, None] * tensor.shape[1] + columns).flatten()  # select both at once: one copy instead of two
        return out.flatten(0, 1).index_select(0, kernels).view(len(rows), len(columns), *tensor.shape[2:])
    for dim, positions in sorted(kept.items()):  # rows first: the cheaper order
        out = out.index_select(dim, torch.as_tensor(positions, device=tensor.device))
    return match_memory_format(out, tensor)


def _empty_like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an uninitialized tensor of another shape, with the dtype, device and memory format of `tensor`."""
    return match_memory_format(torch.empty(shape, dtype=tensor.dtype, device=tensor.device), tensor)


def match_memory_format(tensor: Tensor, other: Tensor) -> Tensor:
    """Return `tensor` in the memory format (contiguous or channels last) of `other`, which has the same rank."""
    for layout, rank in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if other.ndim == rank and not other.is_contiguous() and other.is_contiguous(memory_format=layout):
            return tensor.contiguous(memory_format=layout)
    return tensor.contiguous()


def _drop_removed_parameters_(optimizer: torch.optim.Optimizer, remaining: Collection[int]) -> None:
    """Drop parameters that the model no longer has, and their state, from the optimizer."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in remaining:
                optimizer.state.pop(p, None)
        group["params"] = [p for p in group["params"] if id(p) in remaining]


def _slice_optimizer_state_(
    optimizer: torch.optim.Optimizer, original: Tensor, sliced: nn.Parameter, kept: Mapping[int, Index]
) -> None:
    """Replace a parameter in the optimizer, and slice the state tensors of its shape."""
    for group in optimizer.param_groups:
        group["params"] = [sliced if p is original else p for p in group["params"]]
    state = optimizer.state.pop(original, None)
    if state is not None:
        optimizer.state[sliced] = {
            key: _select_kept(value, kept) if isinstance(value, Tensor) and value.shape == original.shape else value
            for key, value in state.items()
        }
