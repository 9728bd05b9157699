"""Rules of operators that move positions without computing: views, concatenation, splits, shuffles and padding."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..atoms import AtomIds, Atoms, Mark, TracedTensor
from .registry import OperatorCall, alias, barrier, broadcast, rule
from .reshape import repeat_each, reshape_atoms


@rule("constant_pad_nd")
def pad(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Add frozen atoms for the padding."""
    x, amounts = call["self"], list(call["pad"])
    atom_ids = list(x.atom_ids)
    for i in range(0, len(amounts), 2):
        d = len(x.shape) - 1 - i // 2
        before, after = amounts[i], amounts[i + 1]
        if atom_ids[d] is None or (before == 0 and after == 0):
            continue
        if before < 0 or after < 0:
            atoms.freeze(atom_ids[d], "is cropped by the model's code")
            atom_ids[d] = None
        else:
            reason = "is padded with zeros by the model's code, by a fixed amount"
            atom_ids[d] = np.concatenate(
                [atoms.new_frozen_atoms(before, reason), atom_ids[d], atoms.new_frozen_atoms(after, reason)]
            )
    return TracedTensor(
        call.shape,
        atom_ids,
        is_constant=x.is_constant,
        scales_with_rows=x.scales_with_rows and not call["value"],
        keeps_zeros=x.is_zero_with_rows and not call["value"],
    )


@rule("view", "reshape", "_unsafe_view", "_reshape_alias", "_reshape_copy", "squeeze", "unsqueeze")
def view(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Carry atoms through a view."""
    x = call["self"]
    out = alias(x)
    out.shape, out.atom_ids = call.shape, reshape_atoms(atoms, x.atom_ids, x.shape, call.shape, x.scales_with_rows)
    out.batch_norm = None
    return out


@rule("permute", "transpose", "t")
def permute(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Reorder the dimensions."""
    x, n = call["self"], len(call["self"].shape)
    order = list(range(n))
    if call.op == "permute":
        order = [d % n for d in call["dims"]]
    elif n > 1:
        a, b = (-2, -1) if call.op == "t" else (call["dim0"], call["dim1"])
        order[a], order[b] = order[b], order[a]
    out = alias(x)
    out.shape, out.atom_ids, out.batch_norm = call.shape, [x.atom_ids[d] for d in order], None
    return out


@rule("expand")
def expand(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Expand dimensions of size one and remember which."""
    x: TracedTensor = call["self"]
    new_dims: list[AtomIds | None] = [None] * (len(call.shape) - len(x.shape))
    expanded = frozenset(-d for d in range(1, len(x.shape) + 1) if x.shape[-d] == 1 < call.shape[-d])
    return replace(x, shape=call.shape, atom_ids=new_dims + x.atom_ids, batch_norm=None, expanded_dims=expanded)


@rule("repeat")
def repeat(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Tile the atoms."""
    x, num_new = call["self"], len(call.shape) - len(call["self"].shape)
    atom_ids: list[AtomIds | None] = [None] * num_new + list(x.atom_ids)
    for d, old in enumerate(atom_ids):
        if old is not None and call.shape[d] != old.size:
            atom_ids[d] = np.tile(old, call.shape[d] // old.size)
    return TracedTensor(call.shape, atom_ids, is_constant=x.is_constant)


@rule("cat")
def cat(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Concatenate the atoms; tensors of fixed size get frozen ones."""
    tensors = [t for t in call["tensors"] if math.prod(t.shape) or len(t.shape) == len(call.shape)]
    d = (call["dim"] or 0) % len(call.shape)
    shape = (*call.shape[:d], 1, *call.shape[d + 1 :])
    other_dims = [
        TracedTensor(shape, [None if i == d else t.atom_ids[i] for i in range(len(shape))], is_constant=t.is_constant)
        for t in tensors
    ]
    out = broadcast(atoms, other_dims, shape)
    out.shape = call.shape
    if any(t.atom_ids[d] is not None for t in tensors):
        reason = "is a fixed part of a concatenation"
        parts = [(t.atom_ids[d], t.shape[d]) for t in tensors]
        out.atom_ids[d] = np.concatenate(
            [ids if ids is not None else atoms.new_frozen_atoms(size, reason) for ids, size in parts]
        )
    out.scales_with_rows = all(t.scales_with_rows for t in tensors)
    out.keeps_zeros = all(t.is_zero_with_rows for t in tensors)
    return out


@rule("stack")
def stack(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Join the tensors position by position and add a dimension of fixed size."""
    tensors, d = call["tensors"], (call["dim"] or 0) % len(call.shape)
    out = broadcast(atoms, tensors, tensors[0].shape)
    out.atom_ids.insert(d, None)
    out.shape = call.shape
    return out


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def split(atoms: Atoms, call: OperatorCall) -> list[TracedTensor]:
    """Join equal parts, because code that splits into equal parts must still find them equal.

    A compact form that passes the sizes of the parts takes them from its weights, so its parts stay independent.
    """
    x, d = call["self"], (call["dim"] or 0) % len(call["self"].shape)
    sizes = [shape[d] for shape in call.shapes]
    out = [replace(alias(x), shape=shape, batch_norm=None) for shape in call.shapes]
    atom_ids = x.atom_ids[d]
    if atom_ids is None or len(sizes) == 1:
        return out
    parts = np.split(atom_ids, np.cumsum(sizes)[:-1])
    for tensor, part in zip(out, parts, strict=True):
        tensor.atom_ids[d] = part
    if call.op == "split_with_sizes" and atoms.current_module in atoms.compact_modules:
        return out
    if len(set(sizes)) == 1:
        for part in parts[1:]:
            atoms.join(parts[0], part)
        atoms.add_size_hint(sizes[0], parts[0])
        atoms.add_size_hint(atom_ids.size, atom_ids)
    elif atoms.sizes_are_attributes:
        for size, part in zip(sizes, parts, strict=True):
            atoms.add_size_hint(size, part)
    else:
        atoms.freeze(atom_ids, f"is split into unequal pieces {sizes} by the model's code")
    return out


@rule("slice")
def slice_range(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Freeze a dimension of which a fixed range is taken."""
    x, d = call["self"], (call["dim"] or 0) % len(call["self"].shape)
    out = alias(x)
    out.shape = call.shape
    if call.shape[d] == x.shape[d] or x.atom_ids[d] is None:
        return out
    atoms.freeze(x.atom_ids[d], "is sliced at a fixed position by the model's code")
    out.atom_ids[d] = None
    return out


@rule("select", "unbind")
def select(atoms: Atoms, call: OperatorCall) -> TracedTensor | list[TracedTensor]:
    """Freeze a dimension whose positions become separate tensors."""
    x, d = call["self"], (call["dim"] or 0) % len(call["self"].shape)
    atoms.freeze(x.atom_ids[d], f"is split into single positions by `{call.op}`")
    other_dims = [atom_ids for i, atom_ids in enumerate(x.atom_ids) if i != d]
    out = [replace(alias(x), shape=shape, atom_ids=list(other_dims), batch_norm=None) for shape in call.shapes]
    return out if call.op == "unbind" else out[0]


@rule("glu")
def glu(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Join the two halves."""
    x, d = call["self"], call["dim"] % len(call["self"].shape)
    atom_ids = list(x.atom_ids)
    if (both_halves := atom_ids[d]) is not None:
        half = both_halves.size // 2
        atoms.join(both_halves[:half], both_halves[half:])
        atom_ids[d] = both_halves[:half]
    return TracedTensor(call.shape, atom_ids)


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Reshape the channels to (groups, channels per group), transpose, and reshape back."""
    x, groups = call["self"], call["groups"]
    grouped_shape = (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    atom_ids = reshape_atoms(atoms, x.atom_ids, x.shape, grouped_shape)
    atom_ids[1], atom_ids[2] = atom_ids[2], atom_ids[1]
    transposed_shape = (grouped_shape[0], grouped_shape[2], grouped_shape[1], *grouped_shape[3:])
    return TracedTensor(x.shape, reshape_atoms(atoms, atom_ids, transposed_shape, x.shape))


@rule("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Join the channels that become pixels of one channel; repeat a channel whose pixels become channels."""
    x = call["self"]
    atom_ids: list[AtomIds | None] = [None] * len(call.shape)
    if (channels := x.atom_ids[-3]) is not None:
        fewer = min(x.shape[-3], call.shape[-3])
        pixels = max(x.shape[-3], call.shape[-3]) // fewer
        if channels.size == fewer:
            atom_ids[-3] = repeat_each(channels, pixels)
        else:
            runs = channels.reshape(-1, pixels)
            atoms.join(np.broadcast_to(runs[:, :1], runs.shape), runs)
            atom_ids[-3] = runs[:, 0]
    return TracedTensor(call.shape, atom_ids)


@rule("im2col")
def im2col(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Repeat each channel for the positions of the kernel."""
    x = call["self"]
    channels = None if x.atom_ids[1] is None else repeat_each(x.atom_ids[1], math.prod(call["kernel_size"]))
    return TracedTensor(call.shape, [x.atom_ids[0], channels, None])


@rule("embedding")
def embedding(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Write the features of a table whose entries are looked up by index."""
    table = call["weight"]
    atoms.freeze(table.atom_ids[0], "is looked up by index")
    atoms.mark(table.atom_ids[1], Mark.WRITTEN)
    return TracedTensor(call.shape, [None] * (len(call.shape) - 1) + [table.atom_ids[1]])


@rule("index_select", "gather", "index")
def index(atoms: Atoms, call: OperatorCall) -> TracedTensor | list[TracedTensor]:
    """Freeze the dimensions that are indexed."""
    x = call["self"]
    if call.op == "index_select":
        d = call["dim"] % len(x.shape)
        atoms.freeze(x.atom_ids[d], "is selected by index")
        selected = None
        if atoms.current_module in atoms.selective_norms and call["index"].is_parameter:
            selected = call["index"].atom_ids[0]  # the index is cut with what it selects
            atoms.mark(selected, Mark.SELECTED)
        remaining = [selected if i == d else atom_ids for i, atom_ids in enumerate(x.atom_ids)]
        return TracedTensor(call.shape, remaining, is_constant=x.is_constant)
    indices = list(call["indices"] or []) if call.op == "index" else []
    dims = [d for d, index_tensor in enumerate(indices) if index_tensor is not None]
    if not dims or dims[-1] - dims[0] >= len(dims) or any(not isinstance(indices[d], TracedTensor) for d in dims):
        return barrier(atoms, call, f"is selected by `{call.op}`")
    for d in dims:  # adjacent dimensions are indexed together, and the result takes their place
        atoms.freeze(x.atom_ids[d], "is selected by index")
        for atom_ids in indices[d].atom_ids:
            atoms.freeze(atom_ids, "is an index")
    results: list[AtomIds | None] = [None] * (len(call.shape) - len(x.shape) + len(dims))
    return TracedTensor(
        call.shape, [*x.atom_ids[: dims[0]], *results, *x.atom_ids[dims[-1] + 1 :]], is_constant=x.is_constant
    )
