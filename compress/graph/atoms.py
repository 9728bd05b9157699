"""Atoms: ids of positions, joined if the positions must be removed together.

An atom is the id of one position along one dimension of one tensor: row 3 of a weight has one, column 3 another.
Each tensor in the graph is described by a `TracedTensor`: for every dimension either `None` (its size is fixed) or an
array with one atom per position. Rules of operators join atoms, move them, mark them or freeze them. Joined atoms form
a class (union-find), and a class is one dimension that can be kept or dropped.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .attribute_sizes import Attribute, SizeUse

AtomIds = NDArray[np.int64]


class Mark(Enum):
    """Ways in which operators use the positions of a dimension."""

    READ = auto()  # input columns of a parameter are contracted with it
    WRITTEN = auto()  # a parameter's rows produce it
    ADDED = auto()  # activations are added along it: a residual stream
    TOKENS = auto()  # the last of three or more dimensions: features of tokens
    CONTRACTED = auto()  # two activations are multiplied and summed over it, as queries and keys are
    IN_PRODUCT = auto()  # a dimension of an activation that is multiplied with another, summed over or not
    ATTENTION_VALUE = auto()  # features of the values, which are summed with attention weights
    DIVIDED_BY_ROOT = auto()  # the product summed over it is divided by the root of its width
    LAYER_NORMED = auto()  # a layer norm or RMS norm acts on it, which can be cut
    VECTOR_NORMED = auto()  # the norm of a vector is taken along it
    CHANGED_BEFORE_READ = auto()  # more than factors come between its writer and a layer that reads it
    NONZERO_BEFORE_READ = auto()  # zero rows of its writer may not make it zero where a layer reads it
    FACTOR = auto()  # a parameter multiplies what rows of weights wrote
    AFFINE = auto()  # FACTOR, or weight or bias of a layer norm or RMS norm
    BATCH_AFFINE = auto()  # weight or bias of a batch norm
    SELECTED = auto()  # channels that a norm selects from its input


class BatchNormOutput(NamedTuple):
    """A tensor that comes straight from a batch norm, so that its mean is known."""

    weight: str  # name of the norm's weight
    activation: str  # applied since: "", "relu" or "relu6"


class NormInput(NamedTuple):
    """The input of a batch norm that may select some of the channels it is given."""

    module: str
    tensor: str  # one of the norm's own, with a number per channel
    given: AtomIds  # channels of the input
    selected: AtomIds  # channels that the norm uses: some of the same, if the module selects


class GroupedConv(NamedTuple):
    """The way in which a grouped convolution is cut."""

    groups: int
    cut_whole_groups: bool  # else the same positions in every group


@dataclass
class TracedTensor:
    """Describe one tensor of the graph: its shape and the atoms along each of its dimensions."""

    shape: tuple[int, ...]
    atom_ids: list[AtomIds | None]
    is_parameter: bool = False  # one parameter or buffer, possibly rearranged: a factor on it stays a factor
    is_constant: bool = False  # computed from parameters and buffers only
    name: str = ""  # of the parameter or buffer, if `is_parameter`
    batch_norm: BatchNormOutput | None = None
    expanded_dims: frozenset[int] = frozenset()  # dimensions, counted from the last, expanded from one position
    scales_with_rows: bool = False  # a factor on the rows of the weights that wrote it is a factor on it
    keeps_zeros: bool = False  # zero rows of the weights that wrote it, and zero biases, make it zero
    contracted: AtomIds | None = None  # summed over in the product of activations that it comes from

    @property
    def is_zero_with_rows(self) -> bool:
        """Return whether it is zero where the rows and biases that wrote it are zero."""
        return self.scales_with_rows or self.keeps_zeros

    @classmethod
    def fixed(cls, shape: tuple[int, ...], is_constant: bool = False) -> TracedTensor:
        """Describe a tensor of which no dimension can be cut."""
        return cls(shape, [None] * len(shape), is_constant=is_constant)


@dataclass(frozen=True)
class MacTerm:
    """Multiply-adds of one operator: `factor` times the number of atoms along each of `dims`."""

    factor: int
    dims: tuple[AtomIds, ...]

    @property
    def dense_macs(self) -> int:
        """Return the multiply-adds at full width."""
        return self.factor * math.prod(d.size for d in self.dims)


@dataclass(frozen=True)
class SizeHint:
    """A size that a module's own code used; an attribute of the module may hold it."""

    module: str
    size: int
    atom_ids: AtomIds


@dataclass
class Atoms:
    """All atoms of one model, and what the rules of its operators recorded about them."""

    whole_heads: bool = False  # cut whole heads, not the same dimensions of all heads
    separate_qkv: bool = False  # cut queries and keys independently of values
    compact_modules: frozenset[str] = frozenset()  # modules in compact form, whose code takes all widths from weights
    compact_when_cut: frozenset[str] = frozenset()  # modules that switch to their compact form only if they are cut
    selectable_norms: frozenset[str] = frozenset()  # norms that may select the channels they read
    selective_norms: frozenset[str] = frozenset()  # norms that do so already

    count: int = 0
    axes: dict[tuple[str, int], AtomIds] = field(default_factory=dict)  # (tensor name, dim) -> its atoms
    mac_terms: list[MacTerm] = field(default_factory=list)
    size_hints: list[SizeHint] = field(default_factory=list)
    size_uses: list[SizeUse] = field(default_factory=list)  # sizes from attributes that operators were called with
    numeric_attributes: set[Attribute] = field(default_factory=set)  # computed with, as in `dim ** -0.5`
    sizes_are_attributes: bool = False  # the sizes of the operator at work come from attributes, which can follow
    grouped_convs: dict[str, GroupedConv] = field(default_factory=dict)  # by weight
    input_norms: dict[str, BatchNormOutput | None] = field(default_factory=dict)  # reading weight -> norm of its input
    reader_modules: dict[str, set[str]] = field(default_factory=dict)  # reading weight -> modules whose code uses it
    norm_inputs: list[NormInput] = field(default_factory=list)  # of `selectable_norms`
    pair_modules: set[str] = field(default_factory=set)  # modules that return a tuple of two
    current_module: str | None = None  # the module whose operator is traced, for reasons and hints
    _edges: list[tuple[AtomIds, AtomIds]] = field(default_factory=list)
    _qkv_edges: list[tuple[AtomIds, AtomIds]] = field(default_factory=list)  # of queries and keys with values
    _marks: dict[Mark, list[AtomIds]] = field(default_factory=dict)
    _frozen: list[tuple[AtomIds, str]] = field(default_factory=list)

    def new(self, size: int) -> AtomIds:
        """Create `size` atoms."""
        self.count += size
        return np.arange(self.count - size, self.count, dtype=np.int64)

    def join(self, a: AtomIds, b: AtomIds) -> None:
        """Keep or drop positions `a` and `b` together, pair by pair."""
        if a is not b:
            self._edges.append((a, b))

    def join_values(self, qk_ids: AtomIds, value_ids: AtomIds) -> None:
        """Keep or drop values with queries and keys, unless values are changed before a layer reads them.

        If queries and keys cannot be cut, as with rotary position embeddings, values are cut alone.

        Joined values are gated where they are written, as queries and keys are. If a convolution or an activation
        function changes values after that, a dropped value does not stay zero, and the gate would not be exact.
        """
        self._qkv_edges.append((qk_ids, value_ids))

    def freeze(self, atom_ids: AtomIds | None, reason: str) -> None:
        """Exclude these positions from cutting; `reason` completes "this dimension ..."."""
        if atom_ids is not None and atom_ids.size:
            reason = f"{reason} (in {self.current_module})" if self.current_module else reason
            self._frozen.append((atom_ids.ravel(), reason))

    def mark(self, atom_ids: AtomIds | None, mark: Mark) -> None:
        """Record what an operator does with these positions."""
        if atom_ids is not None:
            self._marks.setdefault(mark, []).append(atom_ids.ravel())

    def add_size_hint(self, size: int, atom_ids: AtomIds) -> None:
        """Record that the current module's code used this size: an attribute of it may have to follow the width."""
        if self.current_module is not None:
            self.size_hints.append(SizeHint(self.current_module, size, atom_ids))

    def new_frozen_atoms(self, size: int, reason: str) -> AtomIds:
        """Create `size` atoms that cannot be cut, for positions whose number is fixed (such as padding)."""
        atom_ids = self.new(size)
        self.freeze(atom_ids, reason)
        return atom_ids

    def snapshot(self) -> dict[str, Any]:
        """Return the state as of now, for `restore_`."""
        return {
            name: {mark: list(arrays) for mark, arrays in value.items()} if name == "_marks" else copy.copy(value)
            for name, value in vars(self).items()
        }

    def restore_(self, snapshot: dict[str, Any]) -> None:
        """Return to the state of a snapshot."""
        vars(self).update(snapshot)

    def class_roots(self) -> AtomIds:
        """Return the smallest atom of each atom's class."""
        root = _join_roots(np.arange(self.count, dtype=np.int64), self._edges)
        changed = self.marked_classes(Mark.CHANGED_BEFORE_READ, root)
        frozen = self.freeze_reasons(root)[0] >= 0
        edges = [(qk, v) for qk, v in self._qkv_edges if not changed[root[v]].any() and not frozen[root[qk]].any()]
        return _join_roots(root, edges)

    def marked_classes(self, mark: Mark, roots: AtomIds) -> NDArray[np.bool_]:
        """Return a flag per class (by root): whether one of its atoms has this mark."""
        flags = np.zeros(self.count, dtype=bool)
        for atom_ids in self.marked_arrays(mark):
            flags[roots[atom_ids]] = True
        return flags

    def marked_arrays(self, mark: Mark) -> list[AtomIds]:
        """Return the arrays that got this mark, in the order of the graph."""
        return self._marks.get(mark, [])

    def marked_atoms(self, mark: Mark) -> NDArray[np.bool_]:
        """Return a flag per atom: whether it has this mark."""
        flags = np.zeros(self.count, dtype=bool)
        for atom_ids in self.marked_arrays(mark):
            flags[atom_ids] = True
        return flags

    def freeze_reasons(self, roots: AtomIds) -> tuple[NDArray[np.int64], list[str]]:
        """Return for each class (by root) the index of the first reason why it is frozen, or -1, and all reasons."""
        first_reason = np.full(self.count, -1, dtype=np.int64)
        for i in range(len(self._frozen) - 1, -1, -1):
            first_reason[roots[self._frozen[i][0]]] = i
        return first_reason, [reason for _, reason in self._frozen]


def _join_roots(root: AtomIds, edges: list[tuple[AtomIds, AtomIds]]) -> AtomIds:
    """Return the roots after joining both sides of all edges, by hooking and pointer jumping on whole arrays."""
    if not edges:
        return root
    root = root.copy()
    a, b = (np.concatenate([edge[side].ravel() for edge in edges]) for side in (0, 1))
    while True:
        root_a, root_b = root[a], root[b]
        differ = root_a != root_b
        if not differ.any():
            return root
        a, b, root_a, root_b = a[differ], b[differ], root_a[differ], root_b[differ]
        np.minimum.at(root, np.maximum(root_a, root_b), np.minimum(root_a, root_b))
        while not np.array_equal(root, jumped := root[root]):
            root = jumped
