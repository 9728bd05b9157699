"""From what the operators said about atoms to groups with names, places and costs."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from .cost import Cost
from .groups import Attribute, Group, Groups, Index, Refused, Slot
from .tracing import Trace
from .tracing.atoms import Atoms, Labels

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


def assemble(model: nn.Module, trace: Trace) -> Groups:
    """Turn what the operators said into groups."""
    atoms = trace.atoms
    places = _Places(atoms)
    terms = [(t.factor, [places.number(d) for d in t.dims]) for t in atoms.terms]
    hints = [(h, places.number(h.labels)) for h in atoms.hints]
    roots = atoms.roots()
    reasons, texts = atoms.reasons(roots)
    _refuse_two_roles(atoms, roots, reasons, texts)
    read, written = atoms.marked("read", roots), atoms.marked("written", roots)
    kinds = np.where(atoms.marked("multiplied", roots), 2, np.where(atoms.marked("added", roots), 1, 0))
    place_of = np.full(atoms.count, -1, dtype=np.int64)
    for number, labels in enumerate(places.labels[: len(atoms.places)]):
        place_of[labels] = number
    writer = _first_writer(atoms, roots, place_of)

    random = np.random.default_rng(0)
    signature = (
        random.integers(1, 2**63, size=3, dtype=np.uint64)[kinds]
        + random.integers(1, 2**63, size=len(texts) + 1, dtype=np.uint64)[reasons]
    )
    for labels in places.labels:
        np.add.at(signature, roots[labels], random.integers(1, 2**63, dtype=np.uint64))
    unread = np.flatnonzero(written & ~read & (reasons < 0))
    reasons[unread] = len(texts)
    texts.append("nothing reads it")
    candidates = np.flatnonzero((roots == np.arange(atoms.count)) & written)
    _, first, member = np.unique(signature[candidates], return_index=True, return_inverse=True)
    read_places = _read_places(atoms, place_of)

    found: list[tuple[int, Group | Refused]] = []
    names: dict[str, int] = {}
    by_place = [roots[labels] for labels in places.labels]
    group_of = np.full(atoms.count, -1, dtype=np.int64)
    group_of[candidates] = member
    members = [candidates[member == g] for g in range(len(first))]
    order = sorted(range(len(first)), key=lambda g: (writer[1][members[g][0]], members[g][0]))
    slots: dict[int, list[tuple[int, Index]]] = {g: [] for g in order}
    for number, classes in enumerate(by_place):
        inside = group_of[classes]
        for g in np.unique(inside[inside >= 0]):
            positions = np.flatnonzero(inside == g)
            ranked = positions[np.argsort(classes[positions], kind="stable")].reshape(len(members[g]), -1)
            slots[int(g)].append((number, ranked))
    multiplicity: dict[str, dict[int, int]] = {}
    for g in order:
        key = places.keys[int(writer[0][members[g][0]])]
        root = key[0].removesuffix(".weight") if key else "?"
        names[root] = names.get(root, 0) + 1
        name = root if names[root] == 1 else f"{root}:{names[root]}"
        kind = ("channels", "residual", "attention")[int(kinds[members[g][0]])]
        width = len(members[g])
        if (why := int(reasons[members[g][0]])) >= 0:
            found.append((g, Refused(name, kind, width, texts[why])))
            continue
        lying = [
            Slot(key[0], key[1], index, number in read_places)
            for number, index in slots[g]
            if (key := places.keys[number]) is not None
        ]
        multiplicity[name] = {number: index.shape[1] for number, index in slots[g]}
        found.append((g, Group(name, kind, width, tuple(lying))))

    offered = [g for _, g in found if isinstance(g, Group)]
    sizes = [labels.size for labels in places.labels]
    cost = Cost.build(model, offered, multiplicity, places.keys, sizes, terms)
    result = Groups(
        offered, [r for _, r in found if isinstance(r, Refused)], cost, [], parts=trace.parts, notes=trace.notes
    )
    result.attributes = _attributes(model, atoms, places)
    hinted = _hinted(model, hints, result.attributes)
    norms = {name for name, module in model.named_modules() if isinstance(module, NORMS)}
    result.attributes += [a for a in hinted if a.module in norms]  # a norm without tensors still knows its width
    result.hints = [a for a in hinted if a.module not in norms]
    result.norms = atoms.norms
    return result


def _refuse_two_roles(atoms: Atoms, roots: Labels, reasons: Index, texts: list[str]) -> None:
    """A dimension of one parameter that is both read and written cannot carry a score on its reading side alone."""
    both = np.flatnonzero(atoms.marked_atoms("read") & atoms.marked_atoms("written"))
    if both.size:
        texts.append("is read and written through the same parameter")
        fresh = roots[both][reasons[roots[both]] < 0]
        reasons[fresh] = len(texts) - 1


def _first_writer(atoms: Atoms, roots: Labels, place_of: Index) -> tuple[Index, Index]:
    """For each class the place that writes it first, and when."""
    place = np.full(atoms.count, -1, dtype=np.int64)
    when = np.full(atoms.count, -1, dtype=np.int64)
    marks = atoms.marks("written")
    for time in range(len(marks) - 1, -1, -1):
        place[roots[marks[time]]] = place_of[marks[time]]
        when[roots[marks[time]]] = time
    return place, when


def _read_places(atoms: Atoms, place_of: Index) -> set[int]:
    return {int(n) for labels in atoms.marks("read") for n in np.unique(place_of[labels]) if n >= 0}


def _attributes(model: nn.Module, atoms: Atoms, places: _Places) -> list[Attribute]:
    """The numbers that torch's own layers keep about their shapes, wherever such a layer owns the tensor."""
    modules = dict(model.named_modules())
    number = {key: i for i, key in enumerate(places.keys) if key is not None}
    found: list[Attribute] = []
    owners: dict[int, list[str]] = {}  # tied layers share a weight and keep their own numbers
    for name, module in modules.items():
        if module._parameters.get("weight") is not None:
            owners.setdefault(id(module.weight), []).append(name)

    def add(module: str, name: str, tensor: str, dim: int, times: int = 1, per: int = 1) -> None:
        if (tensor, dim) in number and hasattr(modules[module], name):
            found.append(Attribute(module, name, number[tensor, dim], times, per))

    for tensor in dict.fromkeys(key[0] for key in number):
        path, _, leaf = tensor.rpartition(".")
        for owner in owners.get(id(getattr(modules[path], "weight", None)), [path]):
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
    modules = dict(model.named_modules())
    taken = {(a.module, a.name) for a in known}
    found: dict[tuple[str, str], Attribute] = {}
    for hint, place in hints:
        for name, value in vars(modules[hint.module]).items() if hint.module in modules else ():
            key = (hint.module, name)
            if type(value) is int and value == hint.size and key not in taken:
                found.setdefault(key, Attribute(hint.module, name, place))
    return list(found.values())
