"""Which dimensions live and die together, who writes and who reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .cost import Cost
from .tracing import Part

Index = NDArray[np.int64]
OUTPUT = "is an output of the network"  # of every network


@dataclass(frozen=True, eq=False)
class Slot:
    """Where a group lies in one dimension of one tensor: row u of `index` holds the positions of dimension u."""

    tensor: str
    dim: int
    index: Index  # (width, positions per dimension)
    reads: bool  # whether a score stands here
    column: bool = False  # whether a layer reads the group here
    power: float = 0.0  # what is kept is multiplied with (kept / width) ** power


@dataclass(frozen=True, eq=False)
class Group:
    """Dimensions that are alike: they lie in the same tensors, each as often, and any of them can be dropped."""

    name: str
    kind: str
    width: int
    slots: tuple[Slot, ...]
    product: bool = False  # read by a product of activations or a norm: scores stand on the rows that write it

    part: str = ""  # of attention: qk, v, or qkv where they go together
    branch: bool = False  # all that the last layers of residual branches read
    ways: int = 1  # runs of equal length (heads) that keep as many dimensions each

    def per_way(self, number: int, random: np.random.Generator | None = None) -> Index:
        """So many dimensions of every run: the first, or random ones."""
        runs = np.arange(self.width).reshape(self.ways, -1)
        if random is not None:
            runs = random.permuted(runs, axis=1)
        return np.sort(runs[:, :number].ravel())

    @property
    def readers(self) -> list[Slot]:
        """Where scores stand."""
        return [slot for slot in self.slots if slot.reads]

    @property
    def writers(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.reads == self.product]


@dataclass(frozen=True)
class Refused:
    """Dimensions that are left alone, and why."""

    name: str
    kind: str
    width: int
    reason: str


@dataclass(frozen=True, eq=False)
class Attribute:
    """A number that a module keeps about its own shape: `times * kept(place) / per`."""

    module: str
    name: str
    place: int
    times: int = 1
    per: int = 1


@dataclass(frozen=True)
class Branch:
    """What goes with a group of which nothing is kept."""

    modules: dict[str, str]  # module -> what becomes of it (branches.py)
    unread: tuple[str, ...] = ()  # groups that nobody reads then


@dataclass
class Groups:
    """All groups of a model, what is left alone, and what any choice of widths costs."""

    offered: list[Group]
    refused: list[Refused]
    cost: Cost
    attributes: list[Attribute]
    hints: list[Attribute] = field(default_factory=list)  # attributes that may have to follow, tried if the proof fails
    parts: list[Part] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    norms: dict[str, tuple[str, str] | None] = field(default_factory=dict)  # reading weight -> norm of its input
    branches: dict[str, Branch] = field(default_factory=dict)  # groups that may go altogether
    pairs: set[str] = field(default_factory=set)  # modules that return two things
    forms: set[str] = field(default_factory=set)  # modules that take their compact form where they are cut
    readers: dict[str, set[str]] = field(default_factory=dict)  # reading weight -> modules whose code reads with it

    def __repr__(self) -> str:
        return f"Groups({[f'{g.name}: {g.width}' for g in self.offered]}, {len(self.refused)} refused)"

    def __iter__(self) -> Iterator[Group]:
        return iter(self.offered)

    def __len__(self) -> int:
        return len(self.offered)

    def __getitem__(self, name: str) -> Group:
        return next(g for g in self.offered if g.name == name)

    def held_back(self) -> str:
        """Why there is no more to cut: the commonest reasons, the network's and the target's, and notes."""
        whys = [(r.reason.partition(" (in ")[0], r.reason) for r in self.refused]  # the same in whatever module
        first, counts = dict(reversed(whys)), Counter(why for why, _ in whys)
        common = [why for why, _ in counts.most_common() if why != OUTPUT]
        main = [next((why for why in common if ("target." in why) == ours), "") for ours in (False, True)]
        main = sorted(filter(None, main), key=lambda why: -counts[why]) or [OUTPUT] * (OUTPUT in counts)
        said = []
        for why in main if main != [OUTPUT] or not self.offered else ():
            where = first[why] if counts[why] == 1 else first[why].replace(" (in ", " (first in ")
            said.append(f"{counts[why]} {'is' if counts[why] == 1 else 'are'} left alone: {where}")
        if not self.offered:
            advice = sorted(self.notes, key=lambda note: "target." not in note)[:3]
            said += [note for note in self.notes if note in advice]
        return "".join(f"{text}. " for text in said)

    def refuse(self, groups: Iterable[Group], reason: str) -> None:
        """Take groups off the list."""
        gone = {g.name for g in groups}
        self.refused += [Refused(g.name, g.kind, g.width, reason) for g in self.offered if g.name in gone]
        self.offered = [g for g in self.offered if g.name not in gone]
        self.branches = {name: branch for name, branch in self.branches.items() if name not in gone}
        self.cost = self.cost.without(gone)
