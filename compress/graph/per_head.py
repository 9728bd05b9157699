"""Split attention groups by head, so that every head has its own scores.

All heads keep the same number of dimensions, as the code that splits them requires, but not the same dimensions. Which
position belongs to which head is known from tracing the model by whole heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from .group import Group, Index, Slot
from .model_groups import Groups

HeadTable = dict[tuple[str, int], Index]  # (tensor, dimension) -> head of each position, or -1


def split_by_head_(groups: Groups, whole_heads: Groups, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give every head of the attention groups its own scores.

    Args:
        groups: Groups of dimensions that are cut alike in all heads; they are changed.
        whole_heads: Groups of whole heads of the same model.
        shapes: Shapes of the model's tensors.
    """
    tables = [(group.width, _head_table(group, shapes)) for group in whole_heads if group.kind == "heads"]
    offered: list[Group] = []
    for group in groups:
        num_heads, table = next(
            ((heads, table) for heads, table in tables if any((s.tensor, s.dim) in table for s in group.slots)),
            (0, {}),
        )
        slots = [_split_slot(slot, num_heads, table) for slot in group.slots] if num_heads else []
        if group.kind == "attention" and slots and all(slots):
            split_slots = tuple(slot for slot in slots if slot is not None)
            offered.append(replace(group, width=group.width * num_heads, slots=split_slots, num_heads=num_heads))
        else:
            offered.append(group)
    not_split = [g.name for g in offered if g.kind == "attention" and g.num_heads == 1]
    if not_split:
        groups.notes.append(
            f"{len(not_split)} attention groups have the same scores in all heads, for example {not_split[0]}: "
            "there is one head only, or the positions of the heads overlap or alternate"
        )
    groups.offered = offered
    groups.cost = groups.cost.with_num_heads({g.name: g.num_heads for g in offered})


def _head_table(group: Group, shapes: Mapping[str, tuple[int, ...]]) -> HeadTable:
    table: HeadTable = {}
    for slot in group.slots:
        size = shapes[slot.tensor][slot.dim]
        head = table.setdefault((slot.tensor, slot.dim), np.full(size, -1, dtype=np.int64))
        head[slot.index] = np.arange(group.width)[:, None]
    return table


def _split_slot(slot: Slot, num_heads: int, table: HeadTable) -> Slot | None:
    """Return the slot with a row for every dimension of every head, head by head; None if it cannot be split.

    A slot cannot be split if heads share positions, or if the positions of a head are not consecutive: the kept
    positions of several heads would then be in another order than the code expects.
    """
    if (slot.tensor, slot.dim) not in table:
        return None
    head = table[slot.tensor, slot.dim][slot.index]  # (width, positions)
    order = np.argsort(head, axis=1, kind="stable")
    evenly_split = np.repeat(np.arange(num_heads), head.shape[1] // num_heads)
    if head.shape[1] % num_heads or not (np.take_along_axis(head, order, 1) == evenly_split).all():
        return None
    by_head = np.take_along_axis(slot.index, order, 1).reshape(len(slot.index), num_heads, -1)
    if not (np.diff(by_head, axis=0) == 1).all():
        return None
    return replace(slot, index=np.ascontiguousarray(by_head.transpose(1, 0, 2)).reshape(-1, by_head.shape[2]))
