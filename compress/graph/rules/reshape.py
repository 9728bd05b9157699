"""Carry atoms from the dimensions before a reshape to those after it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..atoms import AtomIds, Atoms


def repeat_each(atom_ids: AtomIds, times: int) -> AtomIds:
    """Repeat each atom `times` in a run, as flattening (C, H, W) does with times = H * W."""
    return np.repeat(atom_ids, times)


def reshape_atoms(
    atoms: Atoms,
    atom_ids: list[AtomIds | None],
    old_shape: tuple[int, ...],
    new_shape: tuple[int, ...],
    scales_with_rows: bool = False,
) -> list[AtomIds | None]:
    """Return the atoms along each dimension of `new_shape`.

    A dimension that is split is cut along one of its parts, at the same positions in all rows of the other parts. What
    rows of weights wrote (`scales_with_rows`) may be split into heads: the last dimension is the width of a head, and
    the one before it counts the heads.
    """
    out: list[AtomIds | None] = [None] * len(new_shape)
    for old_dims, new_dims in matching_blocks(old_shape, new_shape):
        known = [d for d in old_dims if atom_ids[d] is not None]
        if not known:
            continue
        if len(known) > 1:
            for d in known:
                atoms.freeze(atom_ids[d], "is flattened together with another dimension that could be cut")
            continue
        source = atom_ids[known[0]]
        assert source is not None
        wide = [d for d in new_dims if new_shape[d] > 1]
        if len(wide) == 1 and old_shape[known[0]] == new_shape[wide[0]]:
            out[wide[0]] = source
            atoms.add_size_hint(source.size, source)
            continue
        source_shape = [-1 if d == known[0] else 1 for d in old_dims]
        block = np.broadcast_to(source.reshape(source_shape), [old_shape[d] for d in old_dims])
        block = block.reshape([new_shape[d] for d in wide])
        axis = _varying_axis(block)
        if axis is None:  # the dimension is split: cut the longer part, the inner one if they are equal
            cut_whole_heads = atoms.whole_heads and scales_with_rows
            axis = max(range(len(wide)), key=lambda i: (block.shape[i], i))
            if scales_with_rows and wide[-1] == len(new_shape) - 1:  # heads, and the width of a head
                axis = len(wide) - 1
            axis = len(wide) - 2 if cut_whole_heads else axis
            rows = np.moveaxis(block, axis, -1)
            first_row = rows.reshape(-1, block.shape[axis])[0]
            atoms.join(np.broadcast_to(first_row, rows.shape), rows)
            atoms.add_size_hint(block.shape[axis], first_row)
            atoms.add_size_hint(source.size, source)
            block = first_row
        elif len(wide) > 1:
            block = np.moveaxis(block, axis, -1).reshape(-1, block.shape[axis])[0]
        else:  # flattened with dimensions of fixed size: the model's code may know the product
            atoms.add_size_hint(block.size, block)
        out[wide[axis]] = block
    return out


def _varying_axis(block: AtomIds) -> int | None:
    """Return the one axis along which the atoms differ, or None if there are several."""
    if block.ndim == 1:
        return 0
    for axis in range(block.ndim):
        rows = np.moveaxis(block, axis, -1).reshape(-1, block.shape[axis])
        if (rows == rows[0]).all():
            return axis
    return None


def matching_blocks(old_shape: tuple[int, ...], new_shape: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the shortest runs of old and new dimensions with the same number of elements, in pairs."""
    if math.prod(old_shape) == 0:
        return
    i = j = 0
    while i < len(old_shape) or j < len(new_shape):
        old_dims, new_dims = [], []
        old_size = new_size = 1
        while True:
            if old_size <= new_size and i < len(old_shape):
                old_dims.append(i)
                old_size *= old_shape[i]
                i += 1
            elif j < len(new_shape):
                new_dims.append(j)
                new_size *= new_shape[j]
                j += 1
            else:
                break
            if old_size == new_size > 1:
                break
        yield old_dims, new_dims
