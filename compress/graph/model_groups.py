"""All groups of a model: the channels, heads and MLP units that can be removed, and the cost of what remains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from .activation_groups import Activations
from .atoms import BatchNormOutput
from .costs import Cost, SumOfProducts
from .group import BranchRemoval, Group, RefusedGroup, TracedPart, WidthAttribute

OUTPUT_REASON = "is an output of the network"  # every network has such dimensions


@dataclass
class Groups:
    """All groups of a model that can be cut, those that cannot, and the cost of any choice of widths."""

    offered: list[Group]
    refused: list[RefusedGroup]
    cost: Cost
    attributes: list[WidthAttribute]
    parts: list[TracedPart] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    input_norms: dict[str, BatchNormOutput | None] = field(default_factory=dict)  # reading weight -> norm of its input
    branches: dict[str, BranchRemoval] = field(default_factory=dict)  # groups that may be dropped completely
    pair_modules: set[str] = field(default_factory=set)  # modules that return a tuple of two
    compact_modules: set[str] = field(default_factory=set)  # modules that switch to their compact form if they are cut
    selections: dict[str, str] = field(default_factory=dict)  # norm that may select channels -> one of its tensors
    reader_modules: dict[str, set[str]] = field(default_factory=dict)  # reading weight -> modules whose code uses it
    untraced_model: TracedPart | None = None  # the whole model, if only children of it are traced
    activations: Activations | None = None  # the groups of traced activations
    withdrawn: list[Group] = field(default_factory=list)  # offered, then refused because of their chosen widths
    uncut: list[Group] = field(default_factory=list)  # understood, but refused, such as streams that no target names
    num_passes: int = 0  # forward passes of the whole model that finding these groups took

    @classmethod
    def empty(cls) -> Groups:
        """Return no groups, of a network that was not traced."""
        none, nothing = np.zeros(0, dtype=np.int64), SumOfProducts.build([], 0)
        one, no_axes = np.ones(1, dtype=np.int64), np.zeros((1, 0), dtype=np.int64)
        return cls([], [], Cost((), none, one, no_axes, nothing, nothing, none, none, nothing, 0, 0), [])

    def __repr__(self) -> str:
        return f"Groups({[f'{g.name}: {g.width}' for g in self.offered]}, {len(self.refused)} refused)"

    def __iter__(self) -> Iterator[Group]:
        return iter(self.offered)

    def __len__(self) -> int:
        return len(self.offered)

    def __getitem__(self, name: str) -> Group:
        return next(g for g in self.offered if g.name == name)

    def describe_refusals(self) -> str:
        """Return the most common reasons for which network and target exclude groups, and some notes."""
        reasons = [(r.reason.partition(" (in ")[0], r) for r in self.refused]  # without the module
        first_refused, counts = dict(reversed(reasons)), Counter(reason for reason, _ in reasons)
        common = [reason for reason, _ in counts.most_common() if reason != OUTPUT_REASON]
        main = [
            next((reason for reason in common if ("target." in reason) == by_target), "") for by_target in (False, True)
        ]
        main = sorted(filter(None, main), key=lambda reason: -counts[reason])
        main = main or [OUTPUT_REASON] * (OUTPUT_REASON in counts)
        sentences = []
        for reason in main if main != [OUTPUT_REASON] or not self.offered else ():
            first = first_refused[reason]
            if counts[reason] == 1:
                sentences.append(f"1 group is not cut: {first.explanation}")
            else:
                differs = first.explanation != reason  # from group to group, in module or subject
                sentences.append(f"{counts[reason]} groups are not cut{'; the first' * differs}: {first.explanation}")
        if not self.offered:
            advice = sorted(self.notes, key=lambda note: "target." not in note)[:3]
            sentences += [note for note in self.notes if note in advice]
        return "".join(f"{sentence}. " for sentence in sentences)

    def refuse(self, groups: Iterable[Group], reason: str) -> None:
        """Move groups from `offered` to `refused`."""
        names = {g.name for g in groups}
        self.refused += [RefusedGroup(g.name, g.kind, g.width, reason) for g in self.offered if g.name in names]
        self.uncut = [*self.uncut, *(g for g in self.offered if g.name in names)]
        self.offered = [g for g in self.offered if g.name not in names]
        self.branches = {name: branch for name, branch in self.branches.items() if name not in names}
        self.cost = self.cost.without(names)

    def withdraw(self, name: str, reason: str) -> None:
        """Refuse a group that was offered because it cannot be cut to the width that was chosen for it."""
        groups = [g for g in self.offered if g.name == name]
        self.withdrawn = [*self.withdrawn, *groups]
        self.refuse(groups, reason)
