"""Operators that sum over a dimension: convolutions, linear layers and products of tensors.

A contraction of an activation with a parameter *reads* the activation: the parameter's columns are where a score
stands. A contraction of two activations (queries and keys) has no such place. There a score stands on the rows that
write them: what is zero on one side adds nothing to the sum. That holds if nothing but factors comes between the rows
and the product on that side, and it holds for the values alike.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from .atoms import Atoms, Labels, Term, Value
from .operators import Call, barrier, merge, rule


def read(atoms: Atoms, value: Value, x: Labels | None, columns: Labels | None, weight: Value) -> None:
    """`columns` of `weight` are summed against the dimension `x` of `value`."""
    if not value.rows:
        atoms.mark(x, "changed")
    if x is None:
        return atoms.freeze(columns, "reads a tensor of fixed size")
    if columns is None:
        return atoms.freeze(x, "is read by a weight of fixed size")
    atoms.join(x, columns)
    if not weight.weight:
        return atoms.freeze(columns, "is read by a weight that is computed, not stored")
    atoms.mark(columns, "read")
    atoms.readers.setdefault(weight.name, set()).add(atoms.where or "")
    atoms.norms[weight.name] = None if weight.name in atoms.norms else value.norm


def write(atoms: Atoms, rows: Labels | None, bias: Value | None) -> Labels | None:
    """`rows` of a weight are the channels that come out, and `bias` belongs to them."""
    atoms.mark(rows, "written")
    if bias is not None:
        merge(atoms, [Value((bias.shape[0],), [rows]), bias], bias.shape)
    return rows


def term(atoms: Atoms, *sizes: int | Labels | None, shape: tuple[int, ...] = ()) -> None:
    """Count multiply-adds: the product of fixed sizes and of how many atoms are left along the others."""
    fixed = math.prod(s for s in sizes if isinstance(s, int))
    atoms.terms.append(Term(fixed, tuple(s for s in sizes if isinstance(s, np.ndarray))))


def sized(value: Value, *dims: int) -> list[int | Labels]:
    return [value.shape[d] if (labels := value.labels[d]) is None else labels for d in dims]


@rule("convolution", "_convolution")
def convolution(atoms: Atoms, call: Call) -> Value | list[Value]:
    x, weight, bias, groups = call["input"], call["weight"], call["bias"], call["groups"] or 1
    transposed = bool(call["transposed"])
    if len(x.shape) != len(weight.shape):
        return barrier(atoms, call, "is read by a convolution without a batch dimension")
    for labels in weight.labels[2:]:
        atoms.freeze(labels, "is a kernel dimension")
    for labels in x.labels[2:]:
        atoms.freeze(labels, "is convolved over")
    spatial = x.shape[2:] if transposed else call.shape[2:]
    rows, columns = (weight.labels[1], weight.labels[0]) if transposed else (weight.labels[0], weight.labels[1])
    if groups > 1:
        rows, columns = _grouped(atoms, x, weight, groups, transposed, call.shape[1])
    else:
        read(atoms, x, x.labels[1], columns, weight)
    term(atoms, *sized(x, 0), *sized(weight, 0, 1), *weight.shape[2:], *spatial)
    out = write(atoms, rows, bias)
    return Value(call.shape, [x.labels[0], out, *[None] * len(spatial)], rows=weight.weight and groups == 1)


def _grouped(
    atoms: Atoms, x: Value, weight: Value, groups: int, transposed: bool, width: int
) -> tuple[Labels | None, Labels | None]:
    """Cut whole groups, or the same positions in every group: whichever leaves the finer choice."""
    inside, outside = x.shape[1] // groups, width // groups
    long, short = weight.labels[0], weight.labels[1]  # the dimension over all groups, the one within a group
    whole = groups >= min(inside, outside) or x.labels[1] is None
    if weight.name:
        known = atoms.grouped.setdefault(weight.name, (groups, whole))
        whole = known[1]
    if long is None:
        atoms.freeze(x.labels[1], "is read by a weight of fixed size")
        atoms.freeze(short, "is read by a weight of fixed size")
        return None, None
    blocks = long.reshape(groups, -1)
    if whole:  # unit = one group: its inputs, its outputs, its slab of the weight
        unit = blocks[:, :1]
        atoms.join(np.broadcast_to(unit, blocks.shape), blocks)
        atoms.freeze(short, "is the fixed width of a group")
        atoms.hint(groups, unit[:, 0])  # a functional convolution may keep its number of groups in an attribute
        if x.labels[1] is None:
            atoms.freeze(long, "reads a tensor of fixed size")
        else:
            inputs = x.labels[1].reshape(groups, inside)
            atoms.join(np.broadcast_to(unit, inputs.shape), inputs)
        if transposed:
            return np.repeat(unit[:, 0], outside), None
        return long, None
    first = blocks[0]
    atoms.join(np.broadcast_to(first, blocks.shape), blocks)
    assert x.labels[1] is not None
    if transposed:  # rows within a group are `short`, columns over all groups are `long`
        read(atoms, x, x.labels[1], long, weight)
        return (None if short is None else np.tile(short, groups)), long
    inputs = x.labels[1].reshape(groups, inside)
    atoms.join(np.broadcast_to(inputs[0], inputs.shape), inputs)
    read(atoms, replace(x, norm=None), inputs[0] if inside > 1 else None, short, weight)
    if inside == 1:
        atoms.freeze(x.labels[1], "is the only input of its group")
    return long, short


@rule("linear")
def linear(atoms: Atoms, call: Call) -> Value | list[Value]:
    x, weight, bias = call["input"], call["weight"], call["bias"]
    if len(weight.shape) != 2:
        return barrier(atoms, call)
    read(atoms, x, x.labels[-1], weight.labels[1], weight)
    term(atoms, *sized(x, *range(len(x.shape) - 1)), *sized(weight, 0, 1))
    rows = write(atoms, weight.labels[0], bias)
    return Value(call.shape, [*x.labels[:-1], rows], rows=weight.weight)


FACTORS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}


@rule(*FACTORS)
def matmul(atoms: Atoms, call: Call) -> Value | list[Value]:
    a, b = (call[name] for name in FACTORS[call.op])
    _contract(atoms, a, a.labels[-1], b, b.labels[-2])
    batch = merge(
        atoms,
        [Value(v.shape[:-2], list(v.labels[:-2])) for v in (a, b)],
        call.shape[:-2],
    )
    term(atoms, *sized(batch, *range(len(batch.shape))), *sized(a, -2, -1), *sized(b, -1))
    out = Value(call.shape, [*batch.labels, a.labels[-2], b.labels[-1]], constant=a.constant and b.constant)
    if call.op in ("addmm", "baddbmm"):
        out = merge(atoms, [out, call["self"]], call.shape)
    plain = call["self"].constant if call.op in ("addmm", "baddbmm") else True
    if a.weight or b.weight:
        out.rows = plain
        return out
    left = [v.rows for v, labels in ((a, a.labels[-2]), (b, b.labels[-1])) if labels is not None]
    out.rows = plain and any(left)  # of what is left: the values that attention weighs
    out.product = a.labels[-1]
    for one, other, here in ((a, b, b.labels[-1]), (b, a, a.labels[-2])):
        _share(atoms, one.product, here if other.rows else None)
    return out


def _share(atoms: Atoms, summed: Labels | None, weighed: Labels | None) -> None:
    """Queries, keys and the values that they weigh have one score for each dimension (Xue 2022, 4.3.2)."""
    if summed is None or weighed is None:
        return
    atoms.mark(weighed, "weighed")
    if not atoms.apart and summed.size == weighed.size:
        atoms.join(summed, weighed)


def _contract(atoms: Atoms, a: Value, left: Labels | None, b: Value, right: Labels | None) -> None:
    """Sum `left` of `a` against `right` of `b`; only a parameter on one side makes this a reader."""
    if a.weight or b.weight:  # of two that are stored, the second: a table that a layer reads is a buffer
        weight, columns, x, dim = (b, right, a, left) if b.weight else (a, left, b, right)
        for labels in weight.labels:
            if labels is not columns:
                atoms.mark(labels, "written")
        return read(atoms, x, dim, columns, weight)
    if left is not None and right is not None:
        atoms.join(left, right)
    for labels in (left, right):
        if not (a.rows or b.rows) or left is None or right is None:  # zero on one side is enough
            atoms.freeze(labels, "is summed over in a product of two activations, and changed on the way there")
        atoms.mark(labels, "product")
    for value in (a, b):
        for labels in value.labels:
            atoms.mark(labels, "multiplied")


def _outer(value: Value) -> frozenset[int]:
    """Which of the dimensions before the last two were expanded, counted from the last of them."""
    return frozenset(d + 2 for d in value.broad if d < -2)


ATTENTIONS = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable"
)


@rule(*ATTENTIONS.split())
def attention(atoms: Atoms, call: Call) -> Value:
    q, k, v = call["query"], call["key"], call["value"]
    _contract(atoms, q, q.labels[-1], k, k.labels[-1])
    _contract(atoms, Value.fixed((1, 1)), None, v, v.labels[-2])
    _share(atoms, q.labels[-1], v.labels[-1] if v.rows else None)
    if call["scale"] is None:
        atoms.mark(q.labels[-1], "rooted")
    atoms.freeze(q.labels[-2], "is a sequence dimension")
    atoms.freeze(k.labels[-2], "is a sequence dimension")
    mask = [m for name in ("attn_mask", "attn_bias") if isinstance(m := call[name], Value)]
    for m in mask:
        atoms.freeze(m.labels[-1], "is a sequence dimension")
        atoms.freeze(m.labels[-2], "is a sequence dimension")
    shapes = [Value(t.shape[:-2], list(t.labels[:-2]), broad=_outer(t)) for t in (q, k, v, *mask)]
    batch = merge(atoms, shapes, call.shape[:-2])
    lead = sized(batch, *range(len(batch.shape)))
    term(atoms, *lead, *sized(q, -2, -1), *sized(k, -2))
    term(atoms, *lead, *sized(q, -2), *sized(v, -2, -1))
    return Value(call.shape, [*batch.labels, None, v.labels[-1]], rows=v.rows)
