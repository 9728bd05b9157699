"""Rules of operators that sum over a dimension: convolutions, linear layers and products of tensors.

A contraction of an activation with a parameter *reads* the activation, and the gate is on the parameter's input
columns. A contraction of two activations (queries and keys) has no such columns. There the gate is on the rows that
write the activations: what is zero on one side adds nothing to the sum. That requires that only factors come between
the rows and the product on that side. The values of attention are gated in the same way.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..atoms import AtomIds, Atoms, GroupedConv, MacTerm, Mark, TracedTensor
from .registry import OperatorCall, barrier, broadcast, rule


def _read(atoms: Atoms, x: TracedTensor, x_ids: AtomIds | None, weight: TracedTensor, columns: AtomIds | None) -> None:
    """Record that `columns` of `weight` are contracted with the dimension `x_ids` of `x`."""
    if not x.scales_with_rows:
        atoms.mark(x_ids, Mark.CHANGED_BEFORE_READ)
    if not x.is_zero_with_rows:
        atoms.mark(x_ids, Mark.NONZERO_BEFORE_READ)
    if x_ids is None:
        return atoms.freeze(columns, "reads a tensor of fixed size")
    if columns is None:
        return atoms.freeze(x_ids, "is read by a weight of fixed size")
    atoms.join(x_ids, columns)
    if not weight.is_parameter:
        return atoms.freeze(columns, "is read by a weight that is computed, not stored")
    atoms.mark(columns, Mark.READ)
    atoms.reader_modules.setdefault(weight.name, set()).add(atoms.current_module or "")
    atoms.input_norms[weight.name] = None if weight.name in atoms.input_norms else x.batch_norm


def _write(atoms: Atoms, rows: AtomIds | None, bias: TracedTensor | None) -> AtomIds | None:
    """Record that `rows` of a weight produce the output channels, and join `bias` with them."""
    atoms.mark(rows, Mark.WRITTEN)
    if bias is not None:
        broadcast(atoms, [TracedTensor((bias.shape[0],), [rows]), bias], bias.shape)
    return rows


def count_macs(atoms: Atoms, *sizes: int | AtomIds | None) -> None:
    """Add multiply-adds: the product of fixed sizes and of the numbers of atoms that are kept along the others."""
    fixed = math.prod(size for size in sizes if isinstance(size, int))
    atoms.mac_terms.append(MacTerm(fixed, tuple(size for size in sizes if isinstance(size, np.ndarray))))


def sizes_of(tensor: TracedTensor, *dims: int) -> list[int | AtomIds]:
    """Return for each dimension its atoms, or its size if that is fixed."""
    return [tensor.shape[d] if (atom_ids := tensor.atom_ids[d]) is None else atom_ids for d in dims]


@rule("convolution", "_convolution")
def convolution(atoms: Atoms, call: OperatorCall) -> TracedTensor | list[TracedTensor]:
    """Read the input channels and write the output channels."""
    x, weight, bias, groups = call["input"], call["weight"], call["bias"], call["groups"] or 1
    transposed = bool(call["transposed"])
    if len(x.shape) != len(weight.shape):
        return barrier(atoms, call, "is read by a convolution without a batch dimension")
    for atom_ids in weight.atom_ids[2:]:
        atoms.freeze(atom_ids, "is a kernel dimension")
    for atom_ids in x.atom_ids[2:]:
        atoms.freeze(atom_ids, "is convolved over")
    spatial = x.shape[2:] if transposed else call.shape[2:]
    rows, columns = weight.atom_ids[:2][::-1] if transposed else weight.atom_ids[:2]
    if groups > 1:
        rows = _grouped_convolution(atoms, x, weight, groups, transposed, call.shape[1])
    else:
        _read(atoms, x, x.atom_ids[1], weight, columns)
    count_macs(atoms, *sizes_of(x, 0), *sizes_of(weight, 0, 1), *weight.shape[2:], *spatial)
    out = _write(atoms, rows, bias)
    return TracedTensor(
        call.shape,
        [x.atom_ids[0], out, *[None] * len(spatial)],
        scales_with_rows=weight.is_parameter and groups == 1,
        keeps_zeros=weight.is_parameter,
    )


def _grouped_convolution(
    atoms: Atoms, x: TracedTensor, weight: TracedTensor, groups: int, transposed: bool, out_channels: int
) -> AtomIds | None:
    """Cut whole groups, or the same positions in every group, whichever is finer; return the output channels."""
    inputs_per_group, outputs_per_group = x.shape[1] // groups, out_channels // groups
    across_groups, within_group = weight.atom_ids[0], weight.atom_ids[1]
    cut_whole_groups = groups >= min(inputs_per_group, outputs_per_group) or x.atom_ids[1] is None
    if weight.name:  # a weight that is used twice is cut in one way
        known = atoms.grouped_convs.setdefault(weight.name, GroupedConv(groups, cut_whole_groups))
        cut_whole_groups = known.cut_whole_groups
    if across_groups is None:
        atoms.freeze(x.atom_ids[1], "is read by a weight of fixed size")
        atoms.freeze(within_group, "is read by a weight of fixed size")
        return None
    by_group = across_groups.reshape(groups, -1)
    if cut_whole_groups:  # one dimension is one group: its inputs, its outputs, its slab of the weight
        group_ids = by_group[:, :1]
        atoms.join(np.broadcast_to(group_ids, by_group.shape), by_group)
        atoms.freeze(within_group, "is the fixed width of a group")
        atoms.add_size_hint(groups, group_ids[:, 0])  # a functional convolution may take `groups` from an attribute
        if x.atom_ids[1] is None:
            atoms.freeze(across_groups, "reads a tensor of fixed size")
        else:
            inputs = x.atom_ids[1].reshape(groups, inputs_per_group)
            atoms.join(np.broadcast_to(group_ids, inputs.shape), inputs)
        return np.repeat(group_ids[:, 0], outputs_per_group) if transposed else across_groups
    first_group = by_group[0]
    atoms.join(np.broadcast_to(first_group, by_group.shape), by_group)
    assert x.atom_ids[1] is not None
    if transposed:  # rows are `within_group`, columns are `across_groups`
        _read(atoms, x, x.atom_ids[1], weight, across_groups)
        return None if within_group is None else np.tile(within_group, groups)
    inputs = x.atom_ids[1].reshape(groups, inputs_per_group)
    atoms.join(np.broadcast_to(inputs[0], inputs.shape), inputs)
    first_inputs = inputs[0] if inputs_per_group > 1 else None
    _read(atoms, replace(x, batch_norm=None), first_inputs, weight, within_group)
    if inputs_per_group == 1:
        atoms.freeze(x.atom_ids[1], "is the only input of its group")
    return across_groups


@rule("linear")
def linear(atoms: Atoms, call: OperatorCall) -> TracedTensor | list[TracedTensor]:
    """Read the last dimension and write the output features."""
    x, weight, bias = call["input"], call["weight"], call["bias"]
    if len(weight.shape) != 2:
        return barrier(atoms, call)
    _read(atoms, x, x.atom_ids[-1], weight, weight.atom_ids[1])
    count_macs(atoms, *sizes_of(x, *range(len(x.shape) - 1)), *sizes_of(weight, 0, 1))
    rows = _write(atoms, weight.atom_ids[0], bias)
    return TracedTensor(call.shape, [*x.atom_ids[:-1], rows], scales_with_rows=weight.is_parameter)


MATMUL_ARGUMENTS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}


@rule(*MATMUL_ARGUMENTS)
def matmul(atoms: Atoms, call: OperatorCall) -> TracedTensor | list[TracedTensor]:
    """Contract the last dimension of the first factor with the last but one of the second."""
    a, b = (call[name] for name in MATMUL_ARGUMENTS[call.op])
    _contract(atoms, a, a.atom_ids[-1], b, b.atom_ids[-2])
    batch = broadcast(atoms, [TracedTensor(t.shape[:-2], list(t.atom_ids[:-2])) for t in (a, b)], call.shape[:-2])
    count_macs(atoms, *sizes_of(batch, *range(len(batch.shape))), *sizes_of(a, -2, -1), *sizes_of(b, -1))
    out = TracedTensor(
        call.shape,
        [*batch.atom_ids, a.atom_ids[-2], b.atom_ids[-1]],
        is_constant=a.is_constant and b.is_constant,
    )
    adds = call.op in ("addmm", "baddbmm")
    if adds:
        out = broadcast(atoms, [out, call["self"]], call.shape)
    adds_constant = call["self"].is_constant if adds else True
    if a.is_parameter or b.is_parameter:
        out.scales_with_rows = adds_constant
        return out
    remaining = ((a, a.atom_ids[-2]), (b, b.atom_ids[-1]))  # factors and their dimensions that are not summed over
    out.scales_with_rows = adds_constant and any(
        factor.scales_with_rows for factor, atom_ids in remaining if atom_ids is not None
    )
    out.contracted = a.atom_ids[-1]
    for weights, values, features in ((a, b, b.atom_ids[-1]), (b, a, a.atom_ids[-2])):
        _join_attention(atoms, weights.contracted, features if values.scales_with_rows else None)
    return out


def _join_attention(atoms: Atoms, qk_ids: AtomIds | None, value_ids: AtomIds | None) -> None:
    """Give queries, keys and the values that they weight one score per dimension (Xue 2022, 4.3.2)."""
    if qk_ids is None or value_ids is None:
        return
    atoms.mark(value_ids, Mark.ATTENTION_VALUE)
    if not atoms.separate_qkv and qk_ids.size == value_ids.size:
        atoms.join_values(qk_ids, value_ids)


def _contract(atoms: Atoms, a: TracedTensor, a_ids: AtomIds | None, b: TracedTensor, b_ids: AtomIds | None) -> None:
    """Sum the dimension `a_ids` of `a` against `b_ids` of `b`; a parameter on one side reads the other."""
    if a.is_parameter or b.is_parameter:  # if both are, the second: a table that a layer reads is a buffer
        weight, columns, x, x_ids = (b, b_ids, a, a_ids) if b.is_parameter else (a, a_ids, b, b_ids)
        for atom_ids in weight.atom_ids:
            if atom_ids is not columns:
                atoms.mark(atom_ids, Mark.WRITTEN)
        return _read(atoms, x, x_ids, weight, columns)
    if a_ids is not None and b_ids is not None:
        atoms.join(a_ids, b_ids)
    for atom_ids in (a_ids, b_ids):
        if not (a.scales_with_rows or b.scales_with_rows) or a_ids is None or b_ids is None:  # one zero side is enough
            atoms.freeze(atom_ids, "is summed over in a product of activations that do not come straight from layers")
        atoms.mark(atom_ids, Mark.CONTRACTED)
    for factor in (a, b):
        for atom_ids in factor.atom_ids:
            atoms.mark(atom_ids, Mark.IN_PRODUCT)


def _expanded_batch_dims(tensor: TracedTensor) -> frozenset[int]:
    """Return the expanded dimensions before the last two, counted from the last of them."""
    return frozenset(d + 2 for d in tensor.expanded_dims if d < -2)


ATTENTIONS = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable"
)


@rule(*ATTENTIONS.split())
def attention(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Contract queries with keys, and the attention weights with values."""
    q, k, v = call["query"], call["key"], call["value"]
    _contract(atoms, q, q.atom_ids[-1], k, k.atom_ids[-1])
    _contract(atoms, TracedTensor.fixed((1, 1)), None, v, v.atom_ids[-2])
    _join_attention(atoms, q.atom_ids[-1], v.atom_ids[-1] if v.scales_with_rows else None)
    if call["scale"] is None:
        atoms.mark(q.atom_ids[-1], Mark.DIVIDED_BY_ROOT)
    atoms.freeze(q.atom_ids[-2], "is a sequence dimension")
    atoms.freeze(k.atom_ids[-2], "is a sequence dimension")
    masks = [mask for name in ("attn_mask", "attn_bias") if isinstance(mask := call[name], TracedTensor)]
    for mask in masks:
        atoms.freeze(mask.atom_ids[-1], "is a sequence dimension")
        atoms.freeze(mask.atom_ids[-2], "is a sequence dimension")
    batches = [
        TracedTensor(t.shape[:-2], list(t.atom_ids[:-2]), expanded_dims=_expanded_batch_dims(t))
        for t in (q, k, v, *masks)
    ]
    batch = broadcast(atoms, batches, call.shape[:-2])
    batch_sizes = sizes_of(batch, *range(len(batch.shape)))
    count_macs(atoms, *batch_sizes, *sizes_of(q, -2, -1), *sizes_of(k, -2))
    count_macs(atoms, *batch_sizes, *sizes_of(q, -2), *sizes_of(v, -2, -1))
    return TracedTensor(call.shape, [*batch.atom_ids, None, v.atom_ids[-1]], scales_with_rows=v.scales_with_rows)
