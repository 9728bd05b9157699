"""Parameters and multiply-adds of the network at any kept widths, without running it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import nn

from compress.modules import tensors_of

from .axes import Axes
from .group import Group

IntArray = NDArray[np.int64]
ProductTerm = tuple[int, Sequence[int]]  # a factor, and axes whose sizes multiply it


@dataclass(frozen=True)
class SumOfProducts:
    """A sum of products: `factors[t]` times the sizes of the axes `axes[t]`, padded with an axis of size one."""

    factors: IntArray
    axes: IntArray

    @classmethod
    def build(cls, terms: Sequence[ProductTerm], axis_of_size_one: int) -> SumOfProducts:
        """Pad all terms to the same number of axes."""
        longest = max((len(axes) for _, axes in terms), default=0)
        padded = [[*axes, *[axis_of_size_one] * (longest - len(axes))] for _, axes in terms]
        return cls(
            np.array([factor for factor, _ in terms], dtype=np.int64),
            np.array(padded, dtype=np.int64).reshape(len(terms), longest),
        )

    def __call__(self, axis_sizes: IntArray) -> IntArray:
        total: IntArray = (axis_sizes[..., self.axes].prod(-1) * self.factors).sum(-1)
        return total


class _SparseShares(NamedTuple):
    """The entries of `Cost.positions_per_dimension` that are not zero, by axis."""

    groups: IntArray
    positions: IntArray
    axes: IntArray
    starts: IntArray  # where the entries of each axis begin


@dataclass(frozen=True)
class Cost:
    """Cost of the network; `kept` has one width per group in the order of `names`, or is a stack of such rows."""

    names: tuple[str, ...]
    widths: IntArray
    dense_sizes: IntArray  # of each axis in the dense network, and 1 at the end
    positions_per_dimension: (
        IntArray  # (axis, group): positions on the axis of one dimension of the group, in all heads
    )
    parameter_terms: SumOfProducts
    mac_terms: SumOfProducts
    num_heads: IntArray  # of each group: runs of dimensions that keep the same number
    branch_params: IntArray  # of each group: further parameters that are removed if nothing of it is kept

    @classmethod
    def build(
        cls,
        model: nn.Module,
        groups: Sequence[Group],
        positions_per_dimension: Mapping[str, Mapping[int, int]],
        axes: Axes,
        mac_terms: Sequence[ProductTerm],
    ) -> Cost:
        """Collect the cost terms of a model.

        Args:
            model: The dense model, whose parameters are counted.
            groups: The groups that can be cut.
            positions_per_dimension: Group -> axis -> positions that one dimension of the group has on it.
            axes: All axes of the model.
            mac_terms: Products of which the multiply-adds are the sum.
        """
        num_axes = len(axes.sizes)
        positions = np.zeros((num_axes + 1, len(groups)), dtype=np.int64)
        for g, group in enumerate(groups):
            for axis, count in positions_per_dimension[group.name].items():
                positions[axis, g] = count
        parameter_terms: list[ProductTerm] = []
        for name, parameter in tensors_of(model).items():
            if isinstance(parameter, nn.Parameter):
                cut_axes = [
                    axes.number_of_key[name, d] for d in range(parameter.ndim) if (name, d) in axes.number_of_key
                ]
                fixed_sizes = [size for d, size in enumerate(parameter.shape) if (name, d) not in axes.number_of_key]
                parameter_terms.append((math.prod(fixed_sizes), cut_axes))
        num_known = sum(p.numel() for p in tensors_of(model).values() if isinstance(p, nn.Parameter))
        num_scripted = sum(p.numel() for p in model.parameters()) - num_known
        parameter_terms += [(num_scripted, [])] if num_scripted else []
        return cls(
            tuple(g.name for g in groups),
            np.array([g.width for g in groups], dtype=np.int64),
            np.array([*axes.sizes, 1], dtype=np.int64),
            positions,
            SumOfProducts.build(parameter_terms, num_axes),
            SumOfProducts.build(mac_terms, num_axes),
            np.ones(len(groups), dtype=np.int64),
            np.zeros(len(groups), dtype=np.int64),
        )

    def axis_sizes(self, kept: ArrayLike) -> IntArray:
        """Return the size of every axis at these widths."""
        dropped = (self.widths - np.asarray(kept, dtype=np.int64)) // self.num_heads
        sizes: IntArray = np.broadcast_to(self.dense_sizes, (*dropped.shape[:-1], len(self.dense_sizes))).copy()
        shares = self._sparse_shares
        if len(shares.groups):
            removed = np.add.reduceat(dropped[..., shares.groups] * shares.positions, shares.starts, axis=-1)
            sizes[..., shares.axes] -= removed
        return sizes

    @cached_property
    def _sparse_shares(self) -> _SparseShares:
        rows, groups = np.nonzero(self.positions_per_dimension)
        axes, starts = np.unique(rows, return_index=True)
        return _SparseShares(groups, self.positions_per_dimension[rows, groups], axes, starts)

    def params(self, kept: ArrayLike) -> IntArray:
        """Return the number of parameters at these widths."""
        removed_with_branches: IntArray = ((np.asarray(kept) == 0) * self.branch_params).sum(-1)
        total: IntArray = self.parameter_terms(self.axis_sizes(kept)) - removed_with_branches
        return total

    def macs(self, kept: ArrayLike) -> IntArray:
        """Return the multiply-adds at these widths."""
        return self.mac_terms(self.axis_sizes(kept))

    def dims(self, kept: ArrayLike) -> IntArray:
        """Return the number of kept dimensions."""
        total: IntArray = np.asarray(kept, dtype=np.int64).sum(-1)
        return total

    def with_num_heads(self, num_heads: Mapping[str, int]) -> Cost:
        """Return the cost of the same network whose groups are split by head: each width is that of all heads."""
        heads = np.array([num_heads[name] for name in self.names], dtype=np.int64)
        return replace(self, widths=self.widths * heads // self.num_heads, num_heads=heads)

    def without(self, names: Iterable[str]) -> Cost:
        """Return the cost of the same network with these groups at full width."""
        excluded = set(names)
        remaining = [i for i, name in enumerate(self.names) if name not in excluded]
        return replace(
            self,
            names=tuple(self.names[i] for i in remaining),
            widths=self.widths[remaining],
            positions_per_dimension=self.positions_per_dimension[:, remaining],
            num_heads=self.num_heads[remaining],
            branch_params=self.branch_params[remaining],
        )
