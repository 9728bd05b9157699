"""Atoms: one per position of every dimension of every parameter, joined where positions must live and die together.

Each tensor of the graph carries a `Value`: for every dimension either `None` (its size is fixed) or an array with
one atom per position. Operators join atoms, move them, read them or freeze them; nothing is decided per channel.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]


@dataclass
class Value:
    """What is known of one tensor: its shape and the atoms along each of its dimensions."""

    shape: tuple[int, ...]
    labels: list[Labels | None]
    weight: bool = False  # one parameter, moved about but not computed with: a factor on it stays a factor
    constant: bool = False  # made of parameters and buffers alone
    name: str = ""  # of the parameter or buffer, while `weight` holds
    norm: tuple[str, str] | None = None  # (weight of the batch norm that gave it, activation since): its mean is known
    broad: frozenset[int] = frozenset()  # dimensions, counted from the last, that were expanded from one position
    rows: bool = False  # written by rows of weights: a factor on those rows is still a factor on it
    product: Labels | None = None  # what was summed over in the product of activations that it comes from

    @classmethod
    def fixed(cls, shape: tuple[int, ...], constant: bool = False) -> Value:
        return cls(shape, [None] * len(shape), constant=constant)


@dataclass(frozen=True)
class Term:
    """One operator's multiply-adds: `factor` times the number of atoms along each of `dims`."""

    factor: int
    dims: tuple[Labels, ...]

    @property
    def macs(self) -> int:
        """At full width."""
        return self.factor * math.prod(d.size for d in self.dims)


@dataclass(frozen=True)
class Hint:
    """A size that a module's own code used; an attribute of the module may hold it."""

    module: str
    size: int
    labels: Labels
    word: str = ""  # that the attribute's name has in it


@dataclass
class Atoms:
    """All atoms of one model, and what the operators said about them."""

    count: int = 0
    places: dict[tuple[str, int], Labels] = field(default_factory=dict)  # (tensor name, dim) -> its atoms
    terms: list[Term] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    grouped: dict[str, tuple[int, bool]] = field(default_factory=dict)  # conv weight -> groups, whole groups are cut
    norms: dict[str, tuple[str, str] | None] = field(default_factory=dict)  # reading weight -> its input's `norm`
    readers: dict[str, set[str]] = field(default_factory=dict)  # reading weight -> modules whose code reads with it
    heads: bool = False  # whole heads are cut, not dimensions alike in all of them
    apart: bool = False  # queries and keys are cut apart from values
    forms: frozenset[str] = frozenset()  # modules in a compact form, whose code takes every width from its weights
    later: frozenset[str] = frozenset()  # modules that take theirs only where they are cut
    numbers: dict[str, set[int]] = field(default_factory=dict)  # module -> whole numbers among its attributes
    pairs: set[str] = field(default_factory=set)  # modules that return two things
    where: str | None = None  # the module whose operator is at work, for reasons and hints
    _edges: list[tuple[Labels, Labels]] = field(default_factory=list)
    _marks: dict[str, list[Labels]] = field(default_factory=dict)
    _frozen: list[tuple[Labels, str]] = field(default_factory=list)

    def new(self, size: int) -> Labels:
        self.count += size
        return np.arange(self.count - size, self.count, dtype=np.int64)

    def join(self, a: Labels, b: Labels) -> None:
        """Positions `a` and `b` live and die together, pair by pair."""
        if a is not b:
            self._edges.append((a, b))

    def freeze(self, labels: Labels | None, reason: str) -> None:
        """These positions cannot be cut."""
        if labels is not None and labels.size:
            self._frozen.append((labels.ravel(), f"{reason} (in {self.where})" if self.where else reason))

    def mark(self, labels: Labels | None, what: str) -> None:
        """Remember that these positions are `read`, `written`, or met in an `add` or a product of activations."""
        if labels is not None:
            self._marks.setdefault(what, []).append(labels.ravel())

    def hint(self, size: int, labels: Labels, word: str = "") -> None:
        """The model's code used this size here: an attribute may have to follow."""
        if self.where is not None:
            self.hints.append(Hint(self.where, size, labels, word))

    def padding(self, size: int, reason: str) -> Labels:
        labels = self.new(size)
        self.freeze(labels, reason)
        return labels

    def state(self) -> dict[str, Any]:
        """All that was said so far, to go back to."""
        return {
            k: {n: list(v) for n, v in value.items()} if k == "_marks" else copy.copy(value)
            for k, value in vars(self).items()
        }

    def restore_(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def roots(self) -> Labels:
        """The smallest atom of each atom's class: hooking and pointer jumping on whole arrays."""
        root = np.arange(self.count, dtype=np.int64)
        if not self._edges:
            return root
        a = np.concatenate([e[0].ravel() for e in self._edges])
        b = np.concatenate([e[1].ravel() for e in self._edges])
        while True:
            one, other = root[a], root[b]
            apart = one != other
            if not apart.any():
                return root
            a, b, one, other = a[apart], b[apart], one[apart], other[apart]
            np.minimum.at(root, np.maximum(one, other), np.minimum(one, other))
            while not np.array_equal(root, jumped := root[root]):
                root = jumped

    def marked(self, what: str, roots: Labels) -> NDArray[np.bool_]:
        """Which classes (by root) hold an atom with this mark."""
        flags = np.zeros(self.count, dtype=bool)
        for labels in self.marks(what):
            flags[roots[labels]] = True
        return flags

    def marks(self, what: str) -> list[Labels]:
        """The arrays that got this mark, in the order of the graph."""
        return self._marks.get(what, [])

    def marked_atoms(self, what: str) -> NDArray[np.bool_]:
        flags = np.zeros(self.count, dtype=bool)
        for labels in self.marks(what):
            flags[labels] = True
        return flags

    def reasons(self, roots: Labels) -> tuple[NDArray[np.int64], list[str]]:
        """For each class (by root) the index of the first reason why it is frozen, or -1."""
        first = np.full(self.count, -1, dtype=np.int64)
        for i in range(len(self._frozen) - 1, -1, -1):
            first[roots[self._frozen[i][0]]] = i
        return first, [reason for _, reason in self._frozen]
