"""Scores for each head: a group of dimensions that are alike in every head, taken apart by head.

The heads stay of one width, as the code that splits them wants it: each keeps as many dimensions as the others, and not
the same ones. Which position belongs to which head is what following the model by whole heads tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from .groups import Group, Groups, Index, Slot

Heads = dict[tuple[str, int], Index]  # (tensor, dimension) -> head of each position, -1 where it has none


def take_apart(groups: Groups, whole: Groups, sizes: Mapping[str, tuple[int, ...]]) -> None:
    """Give every head of an attention group its own scores; `whole` has the same model's groups of whole heads."""
    tables = [(group.width, _heads(group, sizes)) for group in whole if group.kind == "heads"]
    offered: list[Group] = []
    for group in groups:
        ways, table = next(
            ((w, t) for w, t in tables if any((s.tensor, s.dim) in t for s in group.slots)),
            (0, {}),
        )
        split = [_split(slot, ways, table) for slot in group.slots] if ways else []
        if group.kind == "attention" and split and all(split):
            slots = tuple(slot for slot in split if slot is not None)
            offered.append(replace(group, width=group.width * ways, slots=slots, ways=ways))
        else:
            offered.append(group)
    kept = [g.name for g in offered if g.kind == "attention" and g.ways == 1]
    if kept:
        groups.notes.append(
            f"{len(kept)} groups of attention keep scores that are alike in every head, {kept[0]} among them: it has "
            "one head only, or tensors that its heads share"
        )
    groups.offered = offered
    groups.cost = groups.cost.with_ways({g.name: g.ways for g in offered})


def _heads(group: Group, sizes: Mapping[str, tuple[int, ...]]) -> Heads:
    table: Heads = {}
    for slot in group.slots:
        head = table.setdefault((slot.tensor, slot.dim), np.full(sizes[slot.tensor][slot.dim], -1, dtype=np.int64))
        head[slot.index] = np.arange(group.width)[:, None]
    return table


def _split(slot: Slot, ways: int, table: Heads) -> Slot | None:
    """The slot with a row for every dimension of every head, head after head; None if heads share its positions."""
    if (slot.tensor, slot.dim) not in table:
        return None
    head = table[slot.tensor, slot.dim][slot.index]  # (width, positions)
    order = np.argsort(head, axis=1, kind="stable")
    even = np.repeat(np.arange(ways), head.shape[1] // ways)
    if head.shape[1] % ways or not (np.take_along_axis(head, order, 1) == even).all():
        return None
    rows = np.take_along_axis(slot.index, order, 1).reshape(len(slot.index), ways, -1)
    return replace(slot, index=np.ascontiguousarray(rows.transpose(1, 0, 2)).reshape(-1, rows.shape[2]))
