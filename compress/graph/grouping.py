"""Build the groups of a model from the atoms of its trace."""

from __future__ import annotations

from collections import Counter

import numpy as np
from torch import nn

from .activation_groups import Activations
from .atom_classes import AtomClasses, resolve_selections_
from .axes import Axes
from .costs import Cost
from .group import Group, Index, RefusedGroup, Slot
from .model_groups import Groups
from .tracing import Trace
from .width_attributes import layer_attributes, resolve_size_uses_, size_attributes, unused_attributes

STATISTICS = (".running_mean", ".running_var")


def build_groups(model: nn.Module, trace: Trace) -> Groups:
    """Group the dimensions of a traced model, with their costs and the attributes that follow their widths."""
    atoms = trace.atoms
    followed = resolve_size_uses_(atoms)
    selections = resolve_selections_(atoms)
    axes = Axes(atoms)
    mac_terms = [(term.factor, [axes.number(dim) for dim in term.dims]) for term in atoms.mac_terms]
    for hint in atoms.size_hints:
        axes.number(hint.atom_ids)  # give it an axis, so that its width is tracked
    for width in followed.values():
        axes.number(width.atom_ids)
    classes = AtomClasses.build(atoms, axes)
    members_of_groups = classes.group_members(axes)
    positions_of_groups = _positions(classes, axes, members_of_groups)
    offered: list[Group] = []
    refused: list[RefusedGroup] = []
    positions_per_dimension: dict[str, dict[int, int]] = {}
    members_of_offered: list[Index] = []
    num_groups_of_writer: Counter[str] = Counter()
    for members, positions in zip(members_of_groups, positions_of_groups, strict=True):
        first = int(members[0])
        kind, reason = classes.kind(first).label, int(classes.frozen.index[first])
        attention_part = classes.attention_part(first)
        key = axes.keys[int(classes.first_writers.axis[first])]
        writer = key[0].removesuffix(".weight") if key else "?"
        num_groups_of_writer[writer] += 1
        name = _group_name(writer, num_groups_of_writer[writer], attention_part)
        if reason >= 0:
            refused.append(RefusedGroup(name, kind, len(members), classes.frozen.texts[reason]))
            continue
        slots = _slots(classes, axes, first, positions)
        offered.append(
            Group(
                name,
                kind,
                len(members),
                tuple(slots),
                classes.gated_on_output(first),
                attention_part,
                classes.can_drop_branch(slots, atoms, axes),
            )
        )
        members_of_offered.append(members)
        positions_per_dimension[name] = {axis: index.shape[1] for axis, index in positions.items()}
    cost = Cost.build(model, offered, positions_per_dimension, axes, mac_terms)
    attributes = layer_attributes(model, atoms, axes) + size_attributes(model, followed, axes)
    attributes += unused_attributes(model, atoms, classes.roots, axes, known=attributes)
    return Groups(
        offered,
        refused,
        cost,
        attributes,
        trace.parts,
        trace.notes,
        atoms.input_norms,
        pair_modules=atoms.pair_modules,
        compact_modules={*atoms.compact_modules, *atoms.compact_when_cut},
        selections=selections,
        reader_modules=atoms.reader_modules,
        untraced_model=trace.untraced_model,
        activations=_activations(classes, offered, members_of_offered),
        num_passes=trace.num_passes,
    )


def _activations(classes: AtomClasses, offered: list[Group], members_of_groups: list[Index]) -> Activations:
    group_of_class, dimension_of_class = (np.full(len(classes.roots), -1, dtype=np.int64) for _ in range(2))
    for number, members in enumerate(members_of_groups):
        group_of_class[members], dimension_of_class[members] = number, np.arange(len(members))
    return Activations(classes.roots, group_of_class, dimension_of_class, [group.name for group in offered])


def _group_name(writer: str, number: int, attention_part: str) -> str:
    """Return the name of a group: the module that writes it first, with a suffix if it writes several."""
    if number == 1:
        return writer
    return f"{writer}:{attention_part if attention_part == 'v' and number == 2 else number}"


def _slots(classes: AtomClasses, axes: Axes, member: int, positions: dict[int, Index]) -> list[Slot]:
    """Return the slots of a group, of which `member` is one class."""
    slots = []
    for axis, index in positions.items():
        if (key := axes.keys[axis]) is not None:
            role = classes.slot_role(member, axis)
            gated = role.gated and not key[0].endswith(STATISTICS)
            slots.append(Slot(*key, index, gated, axis in classes.axis_roles.inputs, role.rescale_power))
    return slots


def _positions(classes: AtomClasses, axes: Axes, members_of_groups: list[Index]) -> list[dict[int, Index]]:
    """Return for every group its positions on each axis: axis -> (width, positions per dimension)."""
    positions: list[dict[int, Index]] = [{} for _ in members_of_groups]
    if not members_of_groups:
        return positions
    group_of_class = np.full(len(classes.roots), -1, dtype=np.int64)
    for number, members in enumerate(members_of_groups):
        group_of_class[members] = number
    sizes = axes.sizes
    roots = classes.roots[axes.all_atoms]
    group, axis = group_of_class[roots], np.repeat(np.arange(len(sizes)), sizes)
    position = np.arange(len(roots)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # within its axis
    run, num_classes = group * len(sizes) + axis, len(classes.roots)  # one number to sort by, nearly sorted already
    order = np.argsort(run * num_classes + roots, kind="stable")
    order = order[np.searchsorted(group[order], 0) :]  # atoms in no group come first
    group, axis, position = group[order], axis[order], position[order]
    starts = np.flatnonzero(np.diff(run[order], prepend=-1))
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(order)], strict=True):
        number = int(group[start])
        positions[number][int(axis[start])] = position[start:end].reshape(len(members_of_groups[number]), -1)
    return positions
