"""Groups of dimensions, and the types that go with them.

A dimension is a set of coupled positions in several tensors that must be removed together. A group holds the dimensions
that live in the same tensors; each of them can be removed on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .activation_groups import CallTrace

Index = NDArray[np.int64]
REASON_VERBS = {
    "cannot",
    "has",
    "is",
    "meets",
    "passes",
    "reads",
}  # the first words of reasons whose subject is the dimension


@dataclass(frozen=True, eq=False)
class Slot:
    """The positions of a group in one dimension of one tensor: row u of `index` holds those of dimension u."""

    tensor: str
    dim: int
    index: Index  # (width, positions per dimension)
    gated: bool  # scores multiply the tensor here
    is_input: bool = False  # a layer reads the group here
    rescale_power: float = 0.0  # kept entries are multiplied by (kept / width) ** rescale_power


@dataclass(frozen=True, eq=False)
class Group:
    """Dimensions that live in the same tensors, each with as many positions; any of them can be dropped on its own."""

    name: str
    kind: str  # channels, residual, attention, mlp, heads, embedding or selection
    width: int
    slots: tuple[Slot, ...]
    gated_on_output: bool = False  # gates are on the rows that write it, because an activation product or norm reads it
    attention_part: str = ""  # qk, v, or qkv if they are cut together; empty if the kind is not attention
    can_drop_branch: bool = False  # it is the whole input of the last layers of residual branches
    # 1, or the number of heads if each has its own scores: dimensions are listed head by head, and all heads keep
    # equally many of them.
    num_heads: int = 1

    @property
    def kind_and_part(self) -> str:
        """Return the kind with the part of attention: `mlp`, `attention qk`."""
        return f"{self.kind} {self.attention_part}".rstrip()

    def indices_per_head(self, count: int, generator: np.random.Generator | None = None) -> Index:
        """Return `count` dimensions of every head: the first ones, or random ones if there is a generator."""
        heads = np.arange(self.width).reshape(self.num_heads, -1)
        if generator is not None:
            heads = generator.permuted(heads, axis=1)
        return np.sort(heads[:, :count].ravel())

    @property
    def gated_slots(self) -> list[Slot]:
        """Return the slots whose tensors are multiplied by scores."""
        return [slot for slot in self.slots if slot.gated]

    @property
    def output_slots(self) -> list[Slot]:
        """Return the slots of the tensors that write the group."""
        return [slot for slot in self.slots if slot.gated == self.gated_on_output]


@dataclass(frozen=True)
class RefusedGroup:
    """A group that is not cut, and the reason."""

    name: str
    kind: str
    width: int
    reason: str

    @property
    def explanation(self) -> str:
        """The reason as a clause with a subject: `its dimension is mixed by a layer norm`."""
        return f"its dimension {self.reason}" if self.reason.split(" ")[0] in REASON_VERBS else self.reason


@dataclass(frozen=True, eq=False)
class WidthAttribute:
    """An integer attribute of a module that follows a width: `multiplier * kept size of axis / divisor`."""

    module: str
    name: str
    axis: int
    multiplier: int = 1
    divisor: int = 1
    item: int | None = None  # of an attribute that is a list or tuple


@dataclass(frozen=True)
class BranchRemoval:
    """Modules and groups that are removed if nothing of a group is kept."""

    modules: dict[str, str]  # module -> what replaces it (surgery/branches.py)
    unread_groups: tuple[str, ...] = ()  # groups that no layer reads any more


@dataclass
class TracedPart:
    """A module that was traced, and the inputs it was traced on; verification runs it on the same inputs."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    training: bool = False
    calls: CallTrace = field(default_factory=CallTrace)  # of its modules, in the trace
