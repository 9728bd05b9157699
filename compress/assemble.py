"""From what the operators said about atoms to groups with names, places and costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from .cost import Cost
from .groups import Attribute, Group, Groups, Index, Refused, Slot
from .tracing import Trace
from .tracing.atoms import Atoms, Labels
from .walk import modules_of

KINDS = ("channels", "residual", "attention", "mlp", "heads", "embedding")
ROOT = 0.25  # of the width, on queries and on keys, keeps what a product divides by its root
COUNTS = ("heads", "nhead", "n_head", "num_head")  # attributes that count heads may happen to equal a width
STATISTICS = (".running_mean", ".running_var")
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm)


class _Places:
    """All arrays of atoms that a group may lie in, by number: tensor dimensions first, then bare ones."""

    def __init__(self, atoms: Atoms) -> None:
        self.keys: list[tuple[str, int] | None] = list(atoms.places)
        self.labels: list[Labels] = list(atoms.places.values())
        self._number = {id(labels): i for i, labels in enumerate(self.labels)}

    def number(self, labels: Labels) -> int:
        if id(labels) not in self._number:
            self._number[id(labels)] = len(self.labels)
            self.keys.append(None)
            self.labels.append(labels)
        return self._number[id(labels)]

    @property
    def sizes(self) -> list[int]:
        return [labels.size for labels in self.labels]

    @property
    def atoms(self) -> Labels:
        """Those of all places, one after the other."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self.labels])


@dataclass
class _Classes:
    """Atoms that are joined form a class, known by its smallest atom: one dimension that can be kept or dropped."""

    roots: Labels  # atom -> its class
    kinds: Index  # class -> index into KINDS
    reasons: Index  # class -> index into `texts` of why it is frozen, or -1
    texts: list[str]
    writers: Index  # class -> the place that writes it first, or -1
    when: Index  # class -> how early that is
    read: set[int]  # places that read
    added: NDArray[np.bool_]  # class -> whether it is a stream that is added to
    product: NDArray[np.bool_]  # class -> whether a product of activations reads it
    weighed: NDArray[np.bool_]  # class -> whether it is what attention weighs
    rooted: NDArray[np.bool_]  # class -> whether that product is divided by the root of the width
    normed: NDArray[np.bool_]  # class -> whether it passes through a norm over it
    factors: set[int]  # places that are factors on what rows write
    affine: set[int]  # those, and the weights and biases of norms

    @classmethod
    def of(cls, atoms: Atoms, places: _Places) -> _Classes:
        roots = atoms.roots()
        place_of = np.full(atoms.count, -1, dtype=np.int64)
        for number in range(len(atoms.places)):
            place_of[places.labels[number]] = number
        writers, when = (np.full(atoms.count, -1, dtype=np.int64) for _ in range(2))
        for time, labels in reversed(list(enumerate(atoms.marks("written")))):
            writers[roots[labels]], when[roots[labels]] = place_of[labels], time
        product, plain = atoms.marked("product", roots), np.where(atoms.marked("tokens", roots), 3, 0)
        multiplied = np.where(product, 2, 4) if atoms.heads else 2
        kinds = np.where(atoms.marked("added", roots), 1, plain)
        normed, stream = atoms.marked("normed", roots) | atoms.marked("bent", roots), kinds == 1
        kinds = np.where(normed & stream, 5, kinds)
        kinds = np.where(atoms.marked("multiplied", roots), multiplied, kinds)
        reasons, texts = atoms.reasons(roots)
        reasons[normed & ~stream & ~product & (reasons < 0)] = len(texts)
        texts.append("is mixed by a layer norm")
        both = roots[atoms.marked_atoms("read") & atoms.marked_atoms("written")]
        reasons[both[reasons[both] < 0]] = len(texts)
        reasons[(writers >= 0) & ~atoms.marked("read", roots) & ~product & (reasons < 0)] = len(texts) + 1
        reasons[product & atoms.marked("changed", roots) & (reasons < 0)] = len(texts) + 2
        texts += ["is read and written through the same parameter", "nothing reads it"]
        rooted, mended = atoms.marked("rooted", roots), atoms.marked("affine", roots)
        reasons[rooted & normed & ~mended & (reasons < 0)] = len(texts) + 3
        texts += ["is multiplied with an activation, and changed before a layer reads it"]
        texts += ["is divided by its norm, and its product by the root of its width"]

        def places_with(mark: str) -> set[int]:
            found = np.concatenate([place_of[:0], *(place_of[labels] for labels in atoms.marks(mark))])
            return {n for n in np.unique(found).tolist() if n >= 0}

        read, factors, affine = (places_with(mark) for mark in ("read", "factor", "affine"))
        weighed = atoms.marked("weighed", roots)
        added = atoms.marked("added", roots)
        return cls(
            *(roots, kinds, reasons, texts, writers, when, read, added),
            *(product, weighed, rooted, normed, factors, affine),
        )

    def role(self, one: int, place: int) -> tuple[bool, float]:
        """Whether a score of this class stands in this place, and the power of the width that goes there.

        A product of queries and keys is divided by the root of their width: each takes a fourth root along, and so do
        values, which the layer that reads them makes good. Where queries and keys are normed, the norm's weights do. A
        stream that is normed is zero where it is written, and where a norm gives it back.
        """
        if not self.product[one] and KINDS[int(self.kinds[one])] != "embedding":
            return place in self.read, 0.0
        written = place not in self.read and place not in self.factors
        if not self.rooted[one]:
            return written, 0.0
        if self.normed[one]:
            return written, ROOT if place in self.affine else 0.0
        return written, ROOT if written else -ROOT if place in self.read else 0.0

    def branch(self, slots: list[Slot], atoms: Atoms, number: dict[tuple[str, int], int]) -> bool:
        """Whether layers read these dimensions and nothing else, and add what they make of them to a stream."""
        read = [slot for slot in slots if slot.column]
        for slot in read:
            rows = atoms.places.get((slot.tensor, 1 - slot.dim)) if slot.dim < 2 else None
            if rows is None or slot.index.size != atoms.places[slot.tensor, slot.dim].size:
                return False
            streams = self.roots[rows]
            first = self.writers[streams] == number[slot.tensor, 1 - slot.dim]
            if not self.added[streams].all() or first.any():  # what begins a stream is no branch of it
                return False
        return bool(read)

    def part(self, one: int) -> str:
        """Of attention: qk, v, or qkv where they go together."""
        if KINDS[int(self.kinds[one])] != "attention":
            return ""
        return ("qk" if self.product[one] else "") + ("v" if self.weighed[one] or not self.product[one] else "")

    def alike(self, places: _Places) -> list[Index]:
        """The written classes, those together that lie in the same places, each as often; in the order of the run.

        Classes are compared by a sum of random numbers, one for each place, kind and reason.
        """
        random = np.random.default_rng(0)
        parts = [len(KINDS), len(self.texts) + 1, len(places.labels)]
        kind, reason, place = (random.integers(1, 2**63, size=size, dtype=np.uint64) for size in parts)
        signature = kind[self.kinds] + reason[self.reasons]
        np.add.at(signature, self.roots[places.atoms], np.repeat(place, places.sizes))
        written = np.flatnonzero(self.writers >= 0)
        written = written[self.roots[written] == written]
        _, member = np.unique(signature[written], return_inverse=True)
        groups = np.split(written[np.argsort(member, kind="stable")], np.cumsum(np.bincount(member))[:-1])
        return sorted((g for g in groups if g.size), key=lambda g: (self.when[g[0]], g[0]))


def assemble(model: nn.Module, trace: Trace) -> Groups:
    """Turn what the operators said into groups."""
    atoms = trace.atoms
    places = _Places(atoms)
    terms = [(t.factor, [places.number(d) for d in t.dims]) for t in atoms.terms]
    hints = [(h, places.number(h.labels)) for h in atoms.hints]
    classes = _Classes.of(atoms, places)
    members = classes.alike(places)
    positions = _positions(classes, places, members)
    offered: list[Group] = []
    refused: list[Refused] = []
    shares: dict[str, dict[int, int]] = {}
    names: Counter[str] = Counter()
    number_of = {key: i for i, key in enumerate(places.keys) if key is not None}
    for number, group in enumerate(members):
        key = places.keys[int(classes.writers[group[0]])]
        root = key[0].removesuffix(".weight") if key else "?"
        names[root] += 1
        part = classes.part(int(group[0]))
        name = root if names[root] == 1 else f"{root}:{part if part == 'v' and names[root] == 2 else names[root]}"
        kind, why = KINDS[int(classes.kinds[group[0]])], int(classes.reasons[group[0]])
        if why >= 0:
            refused.append(Refused(name, kind, len(group), classes.texts[why]))
            continue
        slots = []
        for p, index in positions[number].items():
            reads, power = classes.role(int(group[0]), p)
            if (key := places.keys[p]) is not None:
                stands = reads and not key[0].endswith(STATISTICS)
                slots.append(Slot(*key, index, stands, p in classes.read, power))
        by_rows = bool(classes.product[group[0]]) or kind == "embedding"
        offered.append(
            Group(name, kind, len(group), tuple(slots), by_rows, part, classes.branch(slots, atoms, number_of))
        )
        shares[name] = {place: index.shape[1] for place, index in positions[number].items()}
    cost = Cost.build(model, offered, shares, places.keys, places.sizes, terms)
    attributes = _attributes(model, atoms, places)
    hinted = _hinted(model, hints, attributes)
    norms = {name for name, module in modules_of(model).items() if isinstance(module, NORMS)}
    return Groups(
        offered,
        refused,
        cost,
        attributes + [a for a in hinted if a.module in norms],  # a norm without tensors still knows its width
        [a for a in hinted if a.module not in norms],
        trace.parts,
        trace.notes,
        atoms.norms,
        pairs=atoms.pairs,
        forms={*atoms.forms, *atoms.later},
        readers=atoms.readers,
    )


def _positions(classes: _Classes, places: _Places, members: list[Index]) -> list[dict[int, Index]]:
    """For every group, where each of its dimensions lies: place -> (width, positions per dimension)."""
    found: list[dict[int, Index]] = [{} for _ in members]
    if not members:
        return found
    group_of = np.full(len(classes.roots), -1, dtype=np.int64)
    for number, group in enumerate(members):
        group_of[group] = number
    sizes = places.sizes
    roots = classes.roots[places.atoms]
    group, place = group_of[roots], np.repeat(np.arange(len(sizes)), sizes)
    where = np.arange(len(roots)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # position within its place
    run, count = group * len(sizes) + place, len(classes.roots)  # one number to sort by, nearly in order as it is
    order = np.argsort(run * count + roots, kind="stable")
    order = order[np.searchsorted(group[order], 0) :]  # what is in no group comes first
    group, place, where = group[order], place[order], where[order]
    starts = np.flatnonzero(np.diff(run[order], prepend=-1))
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(order)], strict=True):
        number = int(group[start])
        found[number][int(place[start])] = where[start:end].reshape(len(members[number]), -1)
    return found


def _attributes(model: nn.Module, atoms: Atoms, places: _Places) -> list[Attribute]:
    """The numbers that torch's own layers keep about their shapes, wherever such a layer owns the tensor."""
    modules = modules_of(model)
    number = {key: i for i, key in enumerate(places.keys) if key is not None}
    found: list[Attribute] = []
    owners: dict[int, list[str]] = {}  # tied layers share a weight and keep their own numbers
    for name, module in modules.items():
        if module._parameters.get("weight") is not None:
            owners.setdefault(id(module._parameters["weight"]), []).append(name)

    def add(module: str, name: str, tensor: str, dim: int, times: int = 1, per: int = 1) -> None:
        owner = modules[module]
        if (tensor, dim) in number and (name in vars(owner) or hasattr(type(owner), name)):
            found.append(Attribute(module, name, number[tensor, dim], times, per))

    for tensor in dict.fromkeys(key[0] for key in number):
        path, _, leaf = tensor.rpartition(".")
        for owner in owners.get(id(modules[path]._parameters.get("weight")), [path]):
            module = modules[owner]
            if isinstance(module, nn.modules.conv._ConvNd) and leaf == "weight":
                groups, whole = atoms.grouped.get(tensor, (1, False))
                long, short = ("in", "out") if module.transposed else ("out", "in")
                size = module.weight.shape[0]
                add(owner, f"{long}_channels", tensor, 0)
                if whole:
                    add(owner, f"{short}_channels", tensor, 0, module.weight.shape[1] * groups, size)
                    add(owner, "groups", tensor, 0, groups, size)
                else:
                    add(owner, f"{short}_channels", tensor, 1, groups)
            elif isinstance(module, nn.Linear) and leaf == "weight":
                add(owner, "out_features", tensor, 0)
                add(owner, "in_features", tensor, 1)
            elif leaf in ("weight", "running_mean"):
                for name in ("num_features", "num_parameters", "num_channels"):
                    add(owner, name, tensor, 0)
                if isinstance(module, nn.Embedding):
                    add(owner, "embedding_dim", tensor, 1)
                if isinstance(module, nn.GroupNorm):
                    add(owner, "num_groups", tensor, 0, module.num_groups, module.num_channels)
    return found


def _hinted(model: nn.Module, hints: list[tuple[Any, int]], known: list[Attribute]) -> list[Attribute]:
    """Whole-number attributes of a module that equal a size its code used."""
    modules = modules_of(model)
    taken = {(a.module, a.name) for a in known}
    found: dict[tuple[str, str], Attribute] = {}
    for hint, place in hints:
        for name, value in vars(modules[hint.module]).items() if hint.module in modules else ():
            key = (hint.module, name)
            if type(value) is not int or value != hint.size or key in taken:
                continue
            if hint.word in name if hint.word else not name.endswith(COUNTS):
                found.setdefault(key, Attribute(hint.module, name, place))
    return list(found.values())
