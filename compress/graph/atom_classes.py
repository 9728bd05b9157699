"""Classes of joined atoms: the properties of each dimension that can be kept or dropped."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .atoms import AtomIds, Atoms, Mark
from .axes import Axes
from .group import Index, Slot

Flags = NDArray[np.bool_]
# A product of queries and keys is divided by the root of their width. The factor (kept / dense) ** 0.25 on queries and
# on keys keeps the scale of the dense width.
ROOT_POWER = 0.25


class GroupKind(IntEnum):
    """Kinds of groups; `label` is the name in recipes and reports."""

    CHANNELS = 0
    RESIDUAL = 1
    ATTENTION = 2
    MLP = 3
    HEADS = 4
    EMBEDDING = 5
    SELECTION = 6

    @property
    def label(self) -> str:
        """Return the name of the kind."""
        return self.name.lower()


@dataclass
class FreezeReasons:
    """The reasons for which classes cannot be cut."""

    index: Index  # class -> index into `texts`, or -1
    texts: list[str]

    def add(self, frozen: Flags, text: str) -> None:
        """Freeze classes that are not frozen yet."""
        self.index[frozen & (self.index < 0)] = len(self.texts)
        self.texts.append(text)


class FirstWriters(NamedTuple):
    """The tensor that writes each class first."""

    axis: Index  # class -> number of the axis, or -1
    order: Index  # class -> place of the write in the order of the run, or -1


class ClassFlags(NamedTuple):
    """Properties of classes."""

    added: Flags  # part of a residual stream
    contracted: Flags  # a product of activations, or a norm of vectors, sums over it
    attention_value: Flags  # features of the values, which are summed with attention weights
    divided_by_root: Flags  # the product that sums over it is divided by the root of its width
    normed: Flags  # a norm acts on it
    batch_normed: Flags  # a batch norm with weight and bias acts on what rows of weights wrote
    selected: Flags  # a norm selects it from its input


class AxisRoles(NamedTuple):
    """Numbers of axes of tensors, by what operators do with them."""

    inputs: set[int]  # input columns of a layer
    factors: set[int]  # factors on what rows of weights write
    affine: set[int]  # factors, and weights and biases of norms
    batch_affine: set[int]  # weights and biases of batch norms


class SlotRole(NamedTuple):
    """Gating and rescaling of a class on one axis."""

    gated: bool
    rescale_power: float


@dataclass
class AtomClasses:
    """Joined atoms form a class, identified by its smallest atom: one dimension that can be kept or dropped."""

    roots: AtomIds  # atom -> its class
    kinds: Index  # class -> GroupKind
    frozen: FreezeReasons
    first_writers: FirstWriters
    flags: ClassFlags
    axis_roles: AxisRoles

    @classmethod
    def build(cls, atoms: Atoms, axes: Axes) -> AtomClasses:
        """Derive the properties of all classes from the marks of their atoms."""
        roots = atoms.class_roots()
        axis_of_atom = np.full(atoms.count, -1, dtype=np.int64)
        for number in range(len(atoms.axes)):
            axis_of_atom[axes.atom_ids[number]] = number

        def marked(mark: Mark) -> Flags:
            return atoms.marked_classes(mark, roots)

        flags = ClassFlags(
            added=marked(Mark.ADDED),
            contracted=marked(Mark.CONTRACTED),
            attention_value=marked(Mark.ATTENTION_VALUE),
            divided_by_root=marked(Mark.DIVIDED_BY_ROOT),
            normed=marked(Mark.LAYER_NORMED) | marked(Mark.VECTOR_NORMED),
            batch_normed=marked(Mark.BATCH_AFFINE),
            selected=marked(Mark.SELECTED),
        )
        first_writers = _first_writers(atoms, roots, axis_of_atom)
        return cls(
            roots,
            _kinds(atoms, flags, in_product=marked(Mark.IN_PRODUCT), tokens=marked(Mark.TOKENS)),
            _freeze_reasons(atoms, roots, flags, is_written=first_writers.axis >= 0),
            first_writers,
            flags,
            AxisRoles(
                inputs=_axes_with(Mark.READ, atoms, axis_of_atom),
                factors=_axes_with(Mark.FACTOR, atoms, axis_of_atom),
                affine=_axes_with(Mark.AFFINE, atoms, axis_of_atom),
                batch_affine=_axes_with(Mark.BATCH_AFFINE, atoms, axis_of_atom),
            ),
        )

    def kind(self, member: int) -> GroupKind:
        """Return the kind of a class."""
        return GroupKind(int(self.kinds[member]))

    def gated_on_output(self, member: int) -> bool:
        """Return whether gates are on the rows that write a class instead of the input columns of its readers.

        That is so if a product of activations reads the class (queries, keys, and values that share their scores) or
        norms do (a residual stream with layer norms): these have no input columns that a gate could scale.
        """
        return bool(self.flags.contracted[member]) or self.kind(member) is GroupKind.EMBEDDING

    def slot_role(self, member: int, axis: int) -> SlotRole:
        """Return whether a score of a class multiplies this axis, and the power of the width that rescales it.

        A product of queries and keys is divided by the root of their width, so each is rescaled by a fourth root, and
        so are values that are cut with them; the layer that reads the values compensates. If queries and keys are
        normed, by a batch norm or another, the norm's weights are rescaled instead. A residual stream that is normed
        is gated where it is written, and on the weights and biases of its norms.
        """
        is_input = axis in self.axis_roles.inputs
        if not self.gated_on_output(member):
            return SlotRole(is_input, 0.0)
        gated = not is_input and axis not in self.axis_roles.factors
        if not self.flags.divided_by_root[member]:
            return SlotRole(gated, 0.0)
        if self.flags.normed[member]:
            return SlotRole(gated, ROOT_POWER if axis in self.axis_roles.affine else 0.0)
        writes = axis in self.axis_roles.batch_affine if self.flags.batch_normed[member] else gated
        return SlotRole(gated, ROOT_POWER if writes else -ROOT_POWER if is_input else 0.0)

    def can_drop_branch(self, slots: list[Slot], atoms: Atoms, axes: Axes) -> bool:
        """Return whether the group is the whole input of its readers, and these only add to a residual stream."""
        input_slots = [slot for slot in slots if slot.is_input]
        for slot in input_slots:
            rows = atoms.axes.get((slot.tensor, 1 - slot.dim)) if slot.dim < 2 else None
            if rows is None or slot.index.size != atoms.axes[slot.tensor, slot.dim].size:
                return False
            streams = self.roots[rows]
            begins_stream = self.first_writers.axis[streams] == axes.number_of_key[slot.tensor, 1 - slot.dim]
            if not self.flags.added[streams].all() or begins_stream.any():
                return False
        return bool(input_slots)

    def attention_part(self, member: int) -> str:
        """Return qk, v, or qkv if they are cut together; empty if the class does not belong to attention."""
        if self.kind(member) is not GroupKind.ATTENTION:
            return ""
        contracted = bool(self.flags.contracted[member])
        return ("qk" if contracted else "") + ("v" if self.flags.attention_value[member] or not contracted else "")

    def group_members(self, axes: Axes) -> list[Index]:
        """Return arrays of written classes with the same kind, reason and number of positions on every axis.

        They are in the order of the run. Classes are compared by a sum of random numbers, one for each axis, kind and
        reason.
        """
        random = np.random.default_rng(0)
        table_sizes = [len(GroupKind), len(self.frozen.texts) + 1, len(axes.atom_ids)]
        kind, reason, axis = (random.integers(1, 2**63, size=size, dtype=np.uint64) for size in table_sizes)
        signature = kind[self.kinds] + reason[self.frozen.index]
        np.add.at(signature, self.roots[axes.all_atoms], np.repeat(axis, axes.sizes))
        written = np.flatnonzero(self.first_writers.axis >= 0)
        written = written[self.roots[written] == written]
        _, group_of = np.unique(signature[written], return_inverse=True)
        groups = np.split(written[np.argsort(group_of, kind="stable")], np.cumsum(np.bincount(group_of))[:-1])
        order = self.first_writers.order
        return sorted((members for members in groups if members.size), key=lambda g: (order[g[0]], g[0]))


def _first_writers(atoms: Atoms, roots: AtomIds, axis_of_atom: Index) -> FirstWriters:
    axis, order = (np.full(atoms.count, -1, dtype=np.int64) for _ in range(2))
    for time, atom_ids in reversed(list(enumerate(atoms.marked_arrays(Mark.WRITTEN)))):
        axis[roots[atom_ids]], order[roots[atom_ids]] = axis_of_atom[atom_ids], time
    return FirstWriters(axis, order)


def _kinds(atoms: Atoms, flags: ClassFlags, in_product: Flags, tokens: Flags) -> Index:
    kinds = np.where(tokens, GroupKind.MLP, GroupKind.CHANNELS)
    kinds = np.where(flags.added, GroupKind.RESIDUAL, kinds)
    kinds = np.where(flags.normed & (kinds == GroupKind.RESIDUAL), GroupKind.EMBEDDING, kinds)
    features = flags.contracted | flags.attention_value  # of one head, where the code has no dimension of heads
    attention = np.where(features, GroupKind.ATTENTION, GroupKind.HEADS) if atoms.whole_heads else GroupKind.ATTENTION
    kinds = np.where(in_product, attention, kinds)
    return np.where(flags.selected & ~in_product, GroupKind.SELECTION, kinds)


def resolve_selections_(atoms: Atoms) -> dict[str, str]:
    """Return the norms that may select channels of their input, each with one of its tensors; join the others again.

    A norm selects if its input has another use as well (a residual stream, or features that several norms read), and
    layers read its output: then the norm and its readers are cut, and its input stays whole. A norm that alone reads
    its input is cut together with the layer that writes it.
    """
    candidates = atoms.norm_inputs
    while candidates:
        roots = atoms.class_roots()
        read, added = atoms.marked_classes(Mark.READ, roots), atoms.marked_classes(Mark.ADDED, roots)
        num_uses = 2 * (read | added)
        for norm_input in candidates:
            num_uses[np.unique(roots[norm_input.given])] += 1
        joined = {n.module for n in candidates if (num_uses[roots[n.given]] < 2).all()}
        if not joined:  # all inputs that belong to one norm are joined, so that the readers of all outputs are known
            fixed = added | (atoms.freeze_reasons(roots)[0] >= 0)
            for mark in (Mark.CONTRACTED, Mark.IN_PRODUCT, Mark.LAYER_NORMED, Mark.VECTOR_NORMED):
                fixed |= atoms.marked_classes(mark, roots)
            joined = {
                n.module
                for n in candidates
                if (fixed | ~read)[roots[n.selected]].any() or np.isin(roots[n.selected], roots[n.given]).any()
            }
        if not joined:
            break
        for norm_input in candidates:
            if norm_input.module in joined:
                atoms.join(norm_input.given, norm_input.selected)
        candidates = [n for n in candidates if n.module not in joined]
    for norm_input in candidates:
        atoms.freeze(norm_input.given, "is read by norms of which each selects its own channels (target.selection)")
        atoms.mark(norm_input.selected, Mark.SELECTED)
    return {n.module: n.tensor for n in candidates}


def _freeze_reasons(atoms: Atoms, roots: AtomIds, flags: ClassFlags, is_written: Flags) -> FreezeReasons:
    """Return why classes cannot be cut: first the reasons of the rules, then those that follow from marks."""
    frozen = FreezeReasons(*atoms.freeze_reasons(roots))

    def marked(mark: Mark) -> Flags:
        return atoms.marked_classes(mark, roots)

    frozen.add(flags.normed & ~flags.added & ~flags.contracted, "is mixed by a layer norm")
    read_and_written = np.zeros(atoms.count, dtype=bool)
    read_and_written[roots[atoms.marked_atoms(Mark.READ) & atoms.marked_atoms(Mark.WRITTEN)]] = True
    frozen.add(read_and_written, "is both an input and an output of the same parameter")
    frozen.add(is_written & ~marked(Mark.READ) & ~flags.contracted, "is not read by any layer")
    changed = marked(Mark.CHANGED_BEFORE_READ) & (flags.divided_by_root | marked(Mark.NONZERO_BEFORE_READ))
    frozen.add(
        flags.contracted & changed,
        "is summed over in a product of activations or a norm, and something changes it before a layer reads it",
    )
    frozen.add(
        flags.divided_by_root & flags.normed & ~marked(Mark.AFFINE),
        "is normalized without a weight, and the scale of its attention depends on its width",
    )
    return frozen


def _axes_with(mark: Mark, atoms: Atoms, axis_of_atom: Index) -> set[int]:
    """Return the numbers of the axes of tensors that got a mark."""
    arrays = [axis_of_atom[atom_ids] for atom_ids in atoms.marked_arrays(mark)]
    numbers = np.unique(np.concatenate([axis_of_atom[:0], *arrays]))
    return {number for number in numbers.tolist() if number >= 0}
