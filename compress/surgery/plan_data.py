"""The fields of a pruning plan: what is kept of every tensor, and how modules change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from compress.graph import Index

AttributeValue: TypeAlias = int | str | list[int]


class Rescaling(NamedTuple):
    """A factor on some of the kept positions along one dimension of a tensor, e.g. to preserve the attention scale."""

    tensor: str
    dim: int
    positions: Index  # in the dense tensor
    factor: float


@dataclass
class PlanData:
    """Everything that slicing a dense model needs: no tracing, no data and no example input."""

    keep: dict[str, list[int]]  # group -> kept dimensions
    widths: dict[str, int]  # group -> dense width
    slices: dict[str, dict[int, Index]] = field(default_factory=dict)  # tensor -> dim -> kept positions
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # tensor -> dense shape
    gated_dims: dict[str, list[int]] = field(default_factory=dict)  # tensor -> dims whose dropped positions are zeroed
    attributes: dict[str, dict[str, AttributeValue]] = field(default_factory=dict)  # module -> attribute -> new value
    biases: dict[str, int] = field(default_factory=dict)  # module -> size of the bias that compensation adds
    compact_forms: dict[str, str] = field(default_factory=dict)  # module -> class whose compact form replaces it
    selections: dict[str, Index] = field(default_factory=dict)  # norm -> channels of its input that it selects
    scales: list[Rescaling] = field(default_factory=list)
    removed_modules: dict[str, str] = field(default_factory=dict)  # module -> Removal as text, see branches.py
    # These come first: all other names are those of the network that they leave.
    choices: dict[str, str] = field(default_factory=dict)  # choice -> candidate that takes its place
    network: dict[str, Any] = field(default_factory=dict)  # description that a search space is rebuilt by

    def shape_of(self, name: str, dense: Sequence[int]) -> tuple[int, ...]:
        """Return the sliced shape of the tensor `name`, which has the shape `dense` in the dense model."""
        kept = self.slices.get(name, {})
        return tuple(len(kept[d]) if d in kept else size for d, size in enumerate(dense))

    def dropped_positions(self, name: str, dim: int) -> Index:
        """Return the positions along `dim` of the dense tensor `name` that slicing removes."""
        return np.setdiff1d(np.arange(self.shapes[name][dim]), self.slices[name][dim])
