"""Parameters and multiply-adds for any kept widths, without running the network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import nn

from .walk import tensors_of

if TYPE_CHECKING:
    from .groups import Group

Int = NDArray[np.int64]


@dataclass(frozen=True)
class Sum:
    """A sum of products: `factors[t]` times the sizes of the places `places[t]`, padded with the place of size one."""

    factors: Int
    places: Int

    @classmethod
    def build(cls, terms: Sequence[tuple[int, Sequence[int]]], one: int) -> Sum:
        longest = max((len(places) for _, places in terms), default=0)
        padded = [[*places, *[one] * (longest - len(places))] for _, places in terms]
        return cls(
            np.array([factor for factor, _ in terms], dtype=np.int64),
            np.array(padded, dtype=np.int64).reshape(len(terms), longest),
        )

    def __call__(self, sizes: Int) -> Int:
        total: Int = (sizes[..., self.places].prod(-1) * self.factors).sum(-1)
        return total


@dataclass(frozen=True)
class Cost:
    """What a choice of widths costs; `kept` has one width per group in the order of `names`, or is a stack of rows."""

    names: tuple[str, ...]
    widths: Int
    sizes: Int  # of each place in the dense network, and 1 at the end
    share: Int  # (place, group): positions that one dimension of the group, in each of its ways, takes there
    parameter_terms: Sum
    mac_terms: Sum
    ways: Int  # of each group: how many runs of dimensions are cut alike
    along: Int  # of each group: parameters of other widths that go along where nothing of it is kept

    @classmethod
    def build(
        cls,
        model: nn.Module,
        groups: Sequence[Group],
        multiplicity: Mapping[str, Mapping[int, int]],
        keys: Sequence[tuple[str, int] | None],
        sizes: Sequence[int],
        terms: Sequence[tuple[int, Sequence[int]]],
    ) -> Cost:
        share = np.zeros((len(sizes) + 1, len(groups)), dtype=np.int64)
        for g, group in enumerate(groups):
            for place, times in multiplicity[group.name].items():
                share[place, g] = times
        number = {key: i for i, key in enumerate(keys) if key is not None}
        parameters = []
        for name, parameter in tensors_of(model).items():
            if isinstance(parameter, nn.Parameter):
                places = [number[name, d] for d in range(parameter.ndim) if (name, d) in number]
                fixed = [size for d, size in enumerate(parameter.shape) if (name, d) not in number]
                parameters.append((math.prod(fixed), places))
        return cls(
            tuple(g.name for g in groups),
            np.array([g.width for g in groups], dtype=np.int64),
            np.array([*sizes, 1], dtype=np.int64),
            share,
            Sum.build(parameters, len(sizes)),
            Sum.build(terms, len(sizes)),
            np.ones(len(groups), dtype=np.int64),
            np.zeros(len(groups), dtype=np.int64),
        )

    def at(self, kept: ArrayLike) -> Int:
        """The size of every place."""
        gone = (self.widths - np.asarray(kept, dtype=np.int64)) // self.ways
        sizes: Int = np.broadcast_to(self.sizes, (*gone.shape[:-1], len(self.sizes))).copy()
        groups, times, places, starts = self._shares
        if len(groups):
            sizes[..., places] -= np.add.reduceat(gone[..., groups] * times, starts, axis=-1)
        return sizes

    @cached_property
    def _shares(self) -> tuple[Int, Int, Int, Int]:
        """Of `share`, which is nearly all zeros, what is not: group and positions, and where each place begins."""
        rows, groups = np.nonzero(self.share)
        places, starts = np.unique(rows, return_index=True)
        return groups, self.share[rows, groups], places, starts

    def params(self, kept: ArrayLike) -> Int:
        along: Int = ((np.asarray(kept) == 0) * self.along).sum(-1)
        total: Int = self.parameter_terms(self.at(kept)) - along
        return total

    def macs(self, kept: ArrayLike) -> Int:
        return self.mac_terms(self.at(kept))

    def dims(self, kept: ArrayLike) -> Int:
        total: Int = np.asarray(kept, dtype=np.int64).sum(-1)
        return total

    def prices(self, unit: str) -> NDArray[np.float64]:
        """What one dimension of each group costs in the dense network, in params, macs or dims."""
        measure = getattr(self, unit)
        less: Int = measure(self.widths - np.diag(self.ways))
        each: NDArray[np.float64] = (int(measure(self.widths)) - less) / self.ways
        return each

    def with_ways(self, ways: Mapping[str, int]) -> Cost:
        """The same network, some groups of which have their dimensions in so many runs."""
        number = np.array([ways[name] for name in self.names], dtype=np.int64)
        return replace(self, widths=self.widths * number // self.ways, ways=number)

    def without(self, names: Iterable[str]) -> Cost:
        """The same network with these groups left whole."""
        gone = set(names)
        stay = [i for i, name in enumerate(self.names) if name not in gone]
        names = tuple(self.names[i] for i in stay)
        return replace(
            self,
            names=names,
            widths=self.widths[stay],
            share=self.share[:, stay],
            ways=self.ways[stay],
            along=self.along[stay],
        )
