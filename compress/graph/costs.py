"""Parameters, multiply-adds and file size of the network at any kept widths, without running it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

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
    byte_terms: SumOfProducts  # of the tensors in the file of the weights
    header_bytes: int  # of that file, in the dense network
    parameter_bytes: int  # of one parameter; the fewest if they differ

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
        byte_terms: list[ProductTerm] = []
        tensors = tensors_of(model)
        saved = {id(t): t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
        for name, tensor in tensors.items():
            cut_axes = [axes.number_of_key[name, d] for d in range(tensor.ndim) if (name, d) in axes.number_of_key]
            fixed_sizes = [size for d, size in enumerate(tensor.shape) if (name, d) not in axes.number_of_key]
            if isinstance(tensor, nn.Parameter):
                parameter_terms.append((math.prod(fixed_sizes), cut_axes))
            if id(tensor) in saved:
                byte_terms.append((math.prod(fixed_sizes) * tensor.element_size(), cut_axes))
        num_known = sum(p.numel() for p in tensors.values() if isinstance(p, nn.Parameter))
        num_scripted = sum(p.numel() for p in model.parameters()) - num_known
        parameter_terms += [(num_scripted, [])] if num_scripted else []
        known = {id(t) for t in tensors.values()}
        byte_terms += [(t.numel() * t.element_size(), []) for i, t in saved.items() if i not in known]
        return cls(
            tuple(g.name for g in groups),
            np.array([g.width for g in groups], dtype=np.int64),
            np.array([*axes.sizes, 1], dtype=np.int64),
            positions,
            SumOfProducts.build(parameter_terms, num_axes),
            SumOfProducts.build(mac_terms, num_axes),
            np.ones(len(groups), dtype=np.int64),
            np.zeros(len(groups), dtype=np.int64),
            SumOfProducts.build(byte_terms, num_axes),
            _header_bytes(model),
            min((p.element_size() for p in model.parameters()), default=0),
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

    def size(self, kept: ArrayLike) -> IntArray:
        """Return the bytes of the weights' file at these widths: of its tensors, and at most that many of its header.

        The header, names and shapes as text, is that of the dense network; it becomes slightly shorter with the widths.
        """
        removed_with_branches: IntArray = ((np.asarray(kept) == 0) * self.branch_params).sum(-1) * self.parameter_bytes
        total: IntArray = self.byte_terms(self.axis_sizes(kept)) - removed_with_branches + self.header_bytes
        return total

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


def weights_file_bytes(model: nn.Module) -> int:
    """Return the size of the safetensors file with the model's state, or a few bytes per tensor more."""
    saved = {id(t): t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}  # tied ones once
    return _header_bytes(model) + sum(t.numel() * t.element_size() for t in saved.values())


def _header_bytes(model: nn.Module) -> int:
    """Return the length of the header of a safetensors file with the model's state, or slightly more.

    The header is JSON: for each tensor its type, shape and offsets, and one entry with two hashes of 64 digits.
    """
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    end = sum(t.numel() * t.element_size() for t in state.values())  # no offset has more digits
    entries = {name: {"dtype": "F32", "shape": [*t.shape], "data_offsets": [end, end]} for name, t in state.items()}
    hashes = {"__metadata__": {"hashes": "0" * 129}}
    text = json.dumps(hashes | entries, separators=(",", ":"), ensure_ascii=False).encode()
    longer_types = 4 * sum(t.dtype not in (torch.float32, torch.float16, torch.int64) for t in state.values())
    return 8 + -(-(len(text) + longer_types) // 8) * 8
