"""A network in which nobody hears what a plan drops: what slicing has to preserve, at the price of what is kept.

Zeroing would do the same and compute everything. Here layers compute what is kept, and everything else, norms,
activations, sums, views, runs at its full width, as in the dense network.
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

from .groups import Groups, Index
from .plan import Plan
from .slicing import in_format
from .walk import modules_of, within

MANY = 8  # kept rows, of which another is another


@contextlib.contextmanager
def silenced(model: nn.Module, groups: Groups, plan: Plan) -> Iterator[None]:
    """Readers do not hear what the plan drops.

    Plain ones are called with what is left of their input and of their columns: what they do not hear adds nothing to
    their sums. The columns of others are zeroed. Plain layers that write what is dropped compute what is kept, and say
    something else in place of the rest: if nobody hears it, it is of no matter. All that lies between layers runs at
    its full width.
    """
    columns, rows = columns_left(model, groups, plan), _rows_left(model, groups, plan)
    modules = modules_of(model)
    held: dict[int, list[tuple[dict[str, Any], str]]] = {}  # tensor -> where the shell holds it
    for module in modules.values():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for key, tensor in table.items():
                held.setdefault(id(tensor), []).append((table, key))
    undo: list[Callable[[], Any]] = []
    for name, dims in plan.reads.items():
        path, _, leaf = name.rpartition(".")
        layer = modules[path]
        if path in columns and leaf == "weight":
            continue
        quiet = getattr(layer, leaf).detach().clone()
        for dim in dims:
            gone = np.setdiff1d(np.arange(plan.shapes[name][dim]), plan.slices[name][dim])
            quiet.index_fill_(dim, torch.as_tensor(gone, device=quiet.device), 0)
        undo.append(_swap_(held[id(getattr(layer, leaf))], quiet))
    for path in dict.fromkeys([*columns, *rows]):
        undo += _narrow_(modules[path], rows.get(path), columns.get(path))
    try:
        yield
    finally:
        for back in reversed(undo):
            back()


def columns_left(model: nn.Module, groups: Groups, plan: Plan) -> dict[str, Index]:
    """The plain layers whose weight nobody else reads with, and the columns that the plan leaves them.

    None in a module that was followed in its compact form: its own code may read in another way.
    """
    modules = modules_of(model)
    return {
        name.removesuffix(".weight"): plan.slices[name][1]
        for name, dims in plan.reads.items()
        if dims == [1] and _alone(modules, groups, name) and len(plan.slices[name][1])
    }


def _rows_left(model: nn.Module, groups: Groups, plan: Plan) -> dict[str, Index]:
    """The same for the rows that the plan leaves; none of layers that are left with few."""
    modules = modules_of(model)
    return {
        name.removesuffix(".weight"): dims[0]
        for name, dims in plan.slices.items()
        if 0 in dims and 0 not in plan.reads.get(name, ()) and len(dims[0]) >= MANY and _alone(modules, groups, name)
    }


def _alone(modules: Mapping[str, nn.Module], groups: Groups, name: str) -> bool:
    """Whether this is the weight of a plain layer, and nobody else reads with it."""
    path, _, leaf = name.rpartition(".")
    alone = leaf == "weight" and groups.readers.get(name) == {path}
    return alone and not within([path]) & groups.forms and _plain(modules[path])


def _plain(layer: nn.Module) -> bool:
    """Whether calling this layer does what torch's own linear layers and convolutions do."""
    if isinstance(layer, nn.modules.conv._ConvNd):
        own = next(c for c in type(layer).__mro__ if c.__module__ == nn.Conv2d.__module__)
        same = all(getattr(type(layer), code) is getattr(own, code) for code in ("forward", "_conv_forward"))
        return same and layer.groups == 1 and not layer.transposed and "forward" not in vars(layer)
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)


def _narrow_(layer: nn.Module, rows: Index | None, columns: Index | None) -> list[Callable[[], Any]]:
    """Let a plain layer work with these rows and columns alone, for the time of a call; return what undoes it."""
    whole, bias = layer._parameters["weight"], layer._parameters.get("bias")
    assert whole is not None
    dim, index = 1 - whole.ndim, partial(torch.as_tensor, device=whole.device)

    def enter(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        weight: Tensor = whole
        if rows is not None:
            weight = weight.index_select(0, index(rows))
            if bias is not None:
                layer._parameters["bias"] = nn.Parameter(bias.index_select(0, index(rows)), requires_grad=False)
        if columns is not None:
            weight = weight.index_select(1, index(columns)).mul_(loudness(whole.shape[1], columns))
            inputs = (inputs[0].index_select(dim, index(columns)), *inputs[1:])
        layer._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
        return inputs

    def leave(layer: nn.Module, _: Any, result: Tensor) -> Tensor:
        back()
        if rows is None:
            return result
        return in_format(result.index_select(dim, index(_spread(len(whole), rows))), result)

    def back() -> None:
        layer._parameters["weight"] = whole
        if bias is not None:
            layer._parameters["bias"] = bias

    last = layer.register_forward_hook(leave, prepend=True).remove
    return [layer.register_forward_pre_hook(enter).remove, last, back]


def _spread(width: int, kept: Index) -> Index:
    """For each of so many rows the place of a kept one: its own, or for what is dropped any."""
    found = np.random.default_rng(0).integers(len(kept), size=width)
    found[kept] = np.arange(len(kept))
    return found


def loudness(width: int, kept: Index) -> float:
    """A factor on what a layer still hears that keeps a signal from fading, and errors with it, layer after layer."""
    return math.sqrt(width / len(kept)) if len(kept) else 1.0


def _swap_(places: Sequence[tuple[dict[str, Any], str]], new: Tensor) -> Callable[[], None]:
    """Put another tensor in these places of a shell; the model that the shell was made of keeps its own."""
    old = [(table, key, table[key]) for table, key in places]
    put = nn.Parameter(new, requires_grad=False) if isinstance(old[0][2], nn.Parameter) else new
    for table, key in places:
        table[key] = put

    def back() -> None:
        for table, key, tensor in old:
            table[key] = tensor

    return back
