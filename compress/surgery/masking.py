"""Masked reference: the dense model in which no layer reads dropped inputs; slicing must preserve its outputs.

Setting the dropped weights to zero gives the same outputs, at the full cost. To save time, layers here compute with
kept rows and columns only. All between layers (norms, activation functions, sums, views) runs at full width, as in the
dense model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.graph import Groups, Index
from compress.modules import TensorEntry, enclosing_modules, is_plain_layer, modules_of, tensor_entries

from .plan import Plan
from .slicing import match_memory_format

MIN_KEPT_ROWS = 8  # with fewer, kept rows that stand in for dropped ones may hide an error by chance


@contextlib.contextmanager
def masked_reference(model: nn.Module, groups: Groups, plan: Plan, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Mask the inputs that the plan drops at the layers that read them, for the time of the context.

    Plain layers select the kept part of their input and of their columns; the columns of other readers are zeroed.
    Plain layers that write dropped dimensions compute the kept rows only and return other kept rows in place of the
    dropped ones: if no layer reads those, their values do not matter. Everything between layers runs at full width.

    Args:
        model: a shared copy of the dense model.
        groups: its groups.
        plan: the cut.
        dtype: the precision to run in; None for that of the model.
    """
    columns, rows = kept_input_columns(model, groups, plan), _kept_output_rows(model, groups, plan)
    modules = modules_of(model)
    entries_by_id: dict[int, list[TensorEntry]] = {}
    for entry in tensor_entries(model):
        entries_by_id.setdefault(id(entry.tensor), []).append(entry)
    undo: list[Callable[[], Any]] = []
    for name, dims in plan.gated_dims.items():
        path, _, leaf = name.rpartition(".")
        layer = modules[path]
        if path in columns and leaf == "weight":
            continue
        masked = getattr(layer, leaf).detach().to(dtype, copy=True)
        for dim in dims:
            masked.index_fill_(dim, torch.as_tensor(plan.dropped_positions(name, dim), device=masked.device), 0)
        undo.append(_replace_tensor_(entries_by_id[id(getattr(layer, leaf))], masked))
    restricted = dict.fromkeys([*columns, *rows])
    if dtype is not None:  # the weights of restricted layers are cast after the selection: what remains is small
        cast_later = {id(modules[path]._parameters["weight"]) for path in restricted}
        for entries in entries_by_id.values():
            tensor = entries[0].table[entries[0].key]
            if tensor.is_floating_point() and tensor.dtype is not dtype and id(tensor) not in cast_later:
                undo.append(_replace_tensor_([e._replace(tensor=tensor) for e in entries], tensor.detach().to(dtype)))
    for path in restricted:
        undo += _restrict_to_kept_(modules[path], rows.get(path), columns.get(path), dtype)
    try:
        yield
    finally:
        for restore in reversed(undo):
            restore()


def kept_input_columns(model: nn.Module, groups: Groups, plan: Plan) -> dict[str, Index]:
    """Return the kept input columns of plain layers whose weight no other module uses.

    Layers inside a module that was traced in its compact form are left out: its own code may use them differently.
    """
    modules = modules_of(model)
    return {
        name.removesuffix(".weight"): plan.slices[name][1]
        for name, dims in plan.gated_dims.items()
        if dims == [1] and _is_only_use_of_weight(modules, groups, name) and len(plan.slices[name][1])
    }


def _kept_output_rows(model: nn.Module, groups: Groups, plan: Plan) -> dict[str, Index]:
    """Return the kept output rows of the same kind of layers, if they keep at least `MIN_KEPT_ROWS`."""
    modules = modules_of(model)
    return {
        name.removesuffix(".weight"): dims[0]
        for name, dims in plan.slices.items()
        if 0 in dims
        and 0 not in plan.gated_dims.get(name, ())
        and len(dims[0]) >= MIN_KEPT_ROWS
        and _is_only_use_of_weight(modules, groups, name)
    }


def _is_only_use_of_weight(modules: Mapping[str, nn.Module], groups: Groups, name: str) -> bool:
    """Return whether `name` is the weight of a plain layer, and only that layer uses it."""
    path, _, leaf = name.rpartition(".")
    only_user = leaf == "weight" and groups.reader_modules.get(name) == {path}
    return only_user and not enclosing_modules([path]) & groups.compact_modules and is_plain_layer(modules[path])


def _restrict_to_kept_(
    layer: nn.Module, rows: Index | None, columns: Index | None, dtype: torch.dtype | None
) -> list[Callable[[], Any]]:
    """Make a plain layer compute with these rows and columns only, by hooks; return the functions that undo it."""
    dense_weight, dense_bias = layer._parameters["weight"], layer._parameters.get("bias")
    assert dense_weight is not None
    channel_dim, index = 1 - dense_weight.ndim, partial(torch.as_tensor, device=dense_weight.device)

    def select_kept(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        weight: Tensor = dense_weight
        if rows is not None:
            weight = weight.index_select(0, index(rows))
            if dense_bias is not None:
                layer._parameters["bias"] = nn.Parameter(dense_bias.index_select(0, index(rows)), requires_grad=False)
        if columns is not None:
            weight = weight.index_select(1, index(columns)).to(dtype or weight.dtype)
            weight = weight.mul_(rescale_factor(dense_weight.shape[1], columns))
            if args:
                args = (args[0].index_select(channel_dim, index(columns)), *args[1:])
            else:
                kwargs = {**kwargs, "input": kwargs["input"].index_select(channel_dim, index(columns))}
        layer._parameters["weight"] = nn.Parameter(weight.to(dtype or weight.dtype), requires_grad=False)
        return args, kwargs

    def expand_output(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
        restore()
        if rows is None:
            return output
        full_width = index(_gather_index(len(dense_weight), rows))
        return match_memory_format(output.index_select(channel_dim, full_width), output)

    def restore() -> None:
        layer._parameters["weight"] = dense_weight
        if dense_bias is not None:
            layer._parameters["bias"] = dense_bias

    remove_output_hook = layer.register_forward_hook(expand_output, prepend=True).remove
    return [layer.register_forward_pre_hook(select_kept, with_kwargs=True).remove, remove_output_hook, restore]


def _gather_index(width: int, kept: Index) -> Index:
    """Return, for each of `width` rows, its place among the kept rows; dropped rows get a random place."""
    places = np.random.default_rng(0).integers(len(kept), size=width)
    places[kept] = np.arange(len(kept))
    return places


def rescale_factor(width: int, kept: Index) -> float:
    """Return the factor on the kept input columns of a layer that preserves the scale of its output.

    The masked reference and the sliced model both use it. Without it, outputs would shrink from layer to layer, and
    differences between the two could become too small to see.
    """
    return math.sqrt(width / len(kept)) if len(kept) else 1.0


def _replace_tensor_(entries: Sequence[TensorEntry], new: Tensor) -> Callable[[], None]:
    """Replace a tensor of a shared copy in all its entries; return the function that undoes it."""
    replacement = nn.Parameter(new, requires_grad=False) if isinstance(entries[0].tensor, nn.Parameter) else new
    for table, key, _ in entries:
        table[key] = replacement

    def restore() -> None:
        for table, key, tensor in entries:
            table[key] = tensor

    return restore
