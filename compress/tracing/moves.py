"""Operators that move positions about without computing with them: views, joins, splits, shuffles, paddings."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from .atoms import Atoms, Labels, Value
from .operators import Call, barrier, merge, rule, same
from .shapes import reshape, spread


@rule("constant_pad_nd")
def pad(atoms: Atoms, call: Call) -> Value:
    x, amounts = call["self"], list(call["pad"])
    labels = list(x.labels)
    for i in range(0, len(amounts), 2):
        d = len(x.shape) - 1 - i // 2
        before, after = amounts[i], amounts[i + 1]
        if labels[d] is None or (before == 0 and after == 0):
            continue
        if before < 0 or after < 0:
            atoms.freeze(labels[d], "is cropped by the model's code")
            labels[d] = None
        else:
            why = "is padded with zeros by the model's code, by a fixed amount"
            labels[d] = np.concatenate([atoms.padding(before, why), labels[d], atoms.padding(after, why)])
    return Value(call.shape, labels, constant=x.constant, rows=x.rows and not call["value"])


@rule("view", "reshape", "_unsafe_view", "_reshape_alias", "_reshape_copy", "squeeze", "unsqueeze")
def view(atoms: Atoms, call: Call) -> Value:
    x = call["self"]
    out = same(x)
    out.shape, out.labels = call.shape, reshape(atoms, x.labels, x.shape, call.shape, x.rows)
    out.norm = None
    return out


@rule("permute", "transpose", "t")
def permute(atoms: Atoms, call: Call) -> Value:
    x, n = call["self"], len(call["self"].shape)
    order = list(range(n))
    if call.op == "permute":
        order = [d % n for d in call["dims"]]
    elif n > 1:
        a, b = (-2, -1) if call.op == "t" else (call["dim0"], call["dim1"])
        order[a], order[b] = order[b], order[a]
    out = same(x)
    out.shape, out.labels, out.norm = call.shape, [x.labels[d] for d in order], None
    return out


@rule("expand")
def expand(atoms: Atoms, call: Call) -> Value:
    x: Value = call["self"]
    new = len(call.shape) - len(x.shape)
    lead: list[Labels | None] = [None] * new
    broad = frozenset(-d for d in range(1, len(x.shape) + 1) if x.shape[-d] == 1 < call.shape[-d])
    return replace(x, shape=call.shape, labels=lead + x.labels, norm=None, broad=broad)


@rule("repeat")
def repeat(atoms: Atoms, call: Call) -> Value:
    x, new = call["self"], len(call.shape) - len(call["self"].shape)
    labels: list[Labels | None] = [None] * new + list(x.labels)
    for d, old in enumerate(labels):
        if old is not None and call.shape[d] != old.size:
            labels[d] = np.tile(old, call.shape[d] // old.size)
    return Value(call.shape, labels, constant=x.constant)


@rule("cat")
def cat(atoms: Atoms, call: Call) -> Value:
    values = [v for v in call["tensors"] if math.prod(v.shape) or len(v.shape) == len(call.shape)]
    d = (call["dim"] or 0) % len(call.shape)
    shapes = [(*call.shape[:d], 1, *call.shape[d + 1 :])] * len(values)
    rest = [
        Value(s, [None if i == d else v.labels[i] for i in range(len(s))], constant=v.constant)
        for s, v in zip(shapes, values, strict=True)
    ]
    out = merge(atoms, rest, shapes[0])
    out.shape = call.shape
    if any(v.labels[d] is not None for v in values):
        why = "is a fixed part of a concatenation"
        out.labels[d] = np.concatenate(
            [v.labels[d] if v.labels[d] is not None else atoms.padding(v.shape[d], why) for v in values]
        )
    out.rows = all(v.rows for v in values)
    return out


@rule("stack")
def stack(atoms: Atoms, call: Call) -> Value:
    values, d = call["tensors"], (call["dim"] or 0) % len(call.shape)
    out = merge(atoms, values, values[0].shape)
    out.labels.insert(d, None)
    out.shape = call.shape
    return out


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def split(atoms: Atoms, call: Call) -> list[Value]:
    """Equal pieces are cut alike, so that the code which splits in equal pieces goes on doing so.

    A compact form that names the widths of its pieces takes them from its weights.
    """
    x, d = call["self"], (call["dim"] or 0) % len(call["self"].shape)
    sizes = [shape[d] for shape in call.shapes]
    out = [replace(same(x), shape=shape, norm=None) for shape in call.shapes]
    labels = x.labels[d]
    if labels is None or len(sizes) == 1:
        return out
    pieces = np.split(labels, np.cumsum(sizes)[:-1])
    for value, piece in zip(out, pieces, strict=True):
        value.labels[d] = piece
    if call.op == "split_with_sizes" and atoms.where in atoms.forms:
        return out
    if len(set(sizes)) == 1:
        for piece in pieces[1:]:
            atoms.join(pieces[0], piece)
        atoms.hint(sizes[0], pieces[0])
        atoms.hint(labels.size, labels)
    elif set(sizes) <= atoms.numbers.get(atoms.where or "", set()):  # the module keeps these widths in attributes
        for size, piece in zip(sizes, pieces, strict=True):
            atoms.hint(size, piece)
    else:
        atoms.freeze(labels, f"is split into unequal pieces {sizes} by the model's code")
    return out


@rule("slice")
def slice_range(atoms: Atoms, call: Call) -> Value:
    x, d = call["self"], (call["dim"] or 0) % len(call["self"].shape)
    out = same(x)
    out.shape = call.shape
    if call.shape[d] == x.shape[d] or x.labels[d] is None:
        return out
    atoms.freeze(x.labels[d], "is cut at a fixed position by the model's code")
    out.labels[d] = None
    return out


@rule("select", "unbind")
def pick(atoms: Atoms, call: Call) -> Value | list[Value]:
    x, d = call["self"], (call["dim"] or 0) % len(call["self"].shape)
    atoms.freeze(x.labels[d], f"is taken apart by `{call.op}`")
    rest = [v for i, v in enumerate(x.labels) if i != d]
    out = [replace(same(x), shape=s, labels=list(rest), norm=None) for s in call.shapes]
    return out if call.op == "unbind" else out[0]


@rule("glu")
def glu(atoms: Atoms, call: Call) -> Value:
    x, d = call["self"], call["dim"] % len(call["self"].shape)
    labels = list(x.labels)
    if (whole := labels[d]) is not None:
        half = whole.size // 2
        atoms.join(whole[:half], whole[half:])
        labels[d] = whole[:half]
    return Value(call.shape, labels)


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(atoms: Atoms, call: Call) -> Value:
    x, groups = call["self"], call["groups"]
    inner = (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    labels = reshape(atoms, x.labels, x.shape, inner)
    labels[1], labels[2] = labels[2], labels[1]
    return Value(x.shape, reshape(atoms, labels, (inner[0], inner[2], inner[1], *inner[3:]), x.shape))


@rule("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(atoms: Atoms, call: Call) -> Value:
    x = call["self"]
    labels: list[Labels | None] = [None] * len(call.shape)
    if (channels := x.labels[-3]) is not None:
        few = min(x.shape[-3], call.shape[-3])
        square = max(x.shape[-3], call.shape[-3]) // few
        labels[-3] = spread(channels, square) if channels.size == few else gather(atoms, channels, square)
    return Value(call.shape, labels)


def gather(atoms: Atoms, labels: Labels, times: int) -> Labels:
    """Join each run of `times` neighbours and name it by its first."""
    runs = labels.reshape(-1, times)
    atoms.join(np.broadcast_to(runs[:, :1], runs.shape), runs)
    return runs[:, 0]


@rule("im2col")
def im2col(atoms: Atoms, call: Call) -> Value:
    x = call["self"]
    channels = None if x.labels[1] is None else spread(x.labels[1], math.prod(call["kernel_size"]))
    return Value(call.shape, [x.labels[0], channels, None])


@rule("embedding")
def embedding(atoms: Atoms, call: Call) -> Value:
    table = call["weight"]
    atoms.freeze(table.labels[0], "is looked up by index")
    atoms.mark(table.labels[1], "written")
    return Value(call.shape, [None] * (len(call.shape) - 1) + [table.labels[1]])


@rule("index_select", "gather", "index")
def index(atoms: Atoms, call: Call) -> Value | list[Value]:
    x = call["self"]
    if call.op == "index_select":
        d = call["dim"] % len(x.shape)
        atoms.freeze(x.labels[d], "is picked by index")
        return Value(call.shape, [None if i == d else v for i, v in enumerate(x.labels)], constant=x.constant)
    picks = list(call["indices"] or []) if call.op == "index" else []
    at = [d for d, pick in enumerate(picks) if pick is not None]
    if not at or at[-1] - at[0] >= len(at) or any(not isinstance(picks[d], Value) for d in at):
        return barrier(atoms, call, f"is picked by `{call.op}`")
    for d in at:  # neighbours are picked together, and what is picked stands in their place
        atoms.freeze(x.labels[d], "is picked by index")
        for labels in picks[d].labels:
            atoms.freeze(labels, "is an index")
    new: list[Labels | None] = [None] * (len(call.shape) - len(x.shape) + len(at))
    return Value(call.shape, [*x.labels[: at[0]], *new, *x.labels[at[-1] + 1 :]], constant=x.constant)
