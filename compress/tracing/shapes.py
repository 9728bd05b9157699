"""How a reshape carries atoms from the old dimensions to the new ones."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from .atoms import Atoms, Labels


def spread(labels: Labels, times: int) -> Labels:
    """Each atom `times` over, in a run: flattening (C, H, W) with times = H * W."""
    return np.repeat(labels, times)


def reshape(
    atoms: Atoms, labels: list[Labels | None], old: tuple[int, ...], new: tuple[int, ...], rows: bool = False
) -> list[Labels | None]:
    """Carry atoms through a view. Where one dimension is split, the part that is cut is the same in every row.

    What `rows` of weights wrote may be split into heads: the last dimension is a head's own, the one before counts
    them.
    """
    out: list[Labels | None] = [None] * len(new)
    for a, b in blocks(old, new):
        known = [d for d in a if labels[d] is not None]
        if not known:
            continue
        if len(known) > 1:
            for d in known:
                atoms.freeze(labels[d], "is flattened together with another dimension that could be cut")
            continue
        source = labels[known[0]]
        assert source is not None
        wide = [d for d in b if new[d] > 1]
        if len(wide) == 1 and old[known[0]] == new[wide[0]]:
            out[wide[0]] = source
            atoms.hint(source.size, source)
            continue
        shape = [-1 if d == known[0] else 1 for d in a]
        full = np.broadcast_to(source.reshape(shape), [old[d] for d in a]).reshape([new[d] for d in wide])
        axis = _axis(full)
        if axis is None:  # the dimension is split: cut the longer part (the inner one of equals), alike in every row
            whole = atoms.heads and rows
            axis = max(range(len(wide)), key=lambda i: (full.shape[i], i))
            if rows and wide[-1] == len(new) - 1:  # tokens that layers wrote: heads, and what a head has
                axis = len(wide) - 1
            axis = len(wide) - 2 if whole else axis
            alike = np.moveaxis(full, axis, -1)
            first = alike.reshape(-1, full.shape[axis])[0]
            atoms.join(np.broadcast_to(first, alike.shape), alike)
            atoms.hint(full.shape[axis], first, "head" if whole else "")
            atoms.hint(source.size, source)
            full = first
        elif len(wide) > 1:
            full = np.moveaxis(full, axis, -1).reshape(-1, full.shape[axis])[0]
        else:  # flattened with dimensions of fixed size: the model's code may know the product
            atoms.hint(full.size, full)
        out[wide[axis]] = full
    return out


def _axis(full: Labels) -> int | None:
    """The one axis along which the atoms differ, if there is one."""
    if full.ndim == 1:
        return 0
    for axis in range(full.ndim):
        alike = np.moveaxis(full, axis, -1).reshape(-1, full.shape[axis])
        if (alike == alike[0]).all():
            return axis
    return None


def blocks(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Pair up the shortest runs of old and new dimensions with the same number of elements."""
    if math.prod(old) == 0:
        return
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = [], []
        size_a = size_b = 1
        while True:
            if size_a <= size_b and i < len(old):
                a.append(i)
                size_a *= old[i]
                i += 1
            elif j < len(new):
                b.append(j)
                size_b *= new[j]
                j += 1
            else:
                break
            if size_a == size_b > 1:
                break
        yield a, b
