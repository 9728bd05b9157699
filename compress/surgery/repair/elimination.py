"""Dropping of dimensions one after the other, each time the one that the others make up for best.

A layer reads values x with covariance C and has weights with M = sum over outputs and taps of w w^T. If it keeps the
dimensions S and its weights are solved anew, its output has the squared error

    R(S) = min_B tr(M C_e),   C_e: covariance of x - B x_S

With P the inverse covariance of the kept dimensions and Q = B^T M B, dropping a dimension at positions b raises R by
tr(Q_bb P_bb^-1). Several layers that read the same dimensions count relative to the variance of their outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-4  # of the mean variance
DROPPED_AT_ONCE = 1 / 64  # of the dimensions of a wide group
CANDIDATES = 4  # for each dimension that is dropped at once


@dataclass(frozen=True)
class LinearSystem:
    """The kept dimensions of a group as one reader sees them; dimension i is at positions i * size, ..., + size - 1."""

    precision: Tensor  # P
    metric: Tensor  # Q
    size: int  # positions of a dimension
    variance: float  # of the outputs of the reader, as far as they come from the group

    @classmethod
    def of(cls, covariance: Tensor, metric: Tensor, size: int) -> LinearSystem:
        """Return the system with all dimensions.

        Args:
            covariance: of the values that the reader reads.
            metric: M.
            size: positions of a dimension.
        """
        ridge = RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
        variance = max(float((metric * covariance).sum()), torch.finfo(torch.float64).tiny)
        return cls(torch.linalg.inv(covariance + ridge), metric, size, variance)

    def rises(self) -> Tensor:
        """Return by how much the error rises if each of the dimensions is dropped, relative to the variance."""
        if self.size == 1:
            return self.metric.diagonal() / self.precision.diagonal() / self.variance
        own, inverse = self._blocks(self.metric), self._blocks(self.precision)
        rises: Tensor = torch.linalg.solve(inverse, own).diagonal(dim1=1, dim2=2).sum(1) / self.variance
        return rises

    def without(self, dropped: Tensor) -> LinearSystem:
        """Return the system in which dimensions are predicted from the others."""
        gone = self._positions(dropped)
        kept = torch.ones(len(self.precision), dtype=torch.bool)
        kept[gone] = False
        coupling = self.precision[gone][:, kept]
        regression = torch.linalg.solve(self.precision[gone][:, gone], coupling)  # minus the dropped from the kept
        own, cross = self.metric[gone][:, gone], self.metric[kept][:, gone]
        shift = (cross - 0.5 * regression.T @ own) @ regression
        metric = self.metric[kept][:, kept] - shift - shift.T
        return LinearSystem(self.precision[kept][:, kept] - coupling.T @ regression, metric, self.size, self.variance)

    def part(self, dimensions: Tensor) -> LinearSystem:
        """Return the system of some dimensions only, which is enough to drop these one after the other."""
        at = self._positions(dimensions)
        return LinearSystem(self.precision[at][:, at], self.metric[at][:, at], self.size, self.variance)

    def _positions(self, dimensions: Tensor) -> Tensor:
        return (dimensions[:, None] * self.size + torch.arange(self.size)).flatten()

    def _blocks(self, matrix: Tensor) -> Tensor:
        """Return the blocks of the dimensions on the diagonal, of shape (dimensions, size, size)."""
        count = len(matrix) // self.size
        return matrix.view(count, self.size, count, self.size).diagonal(dim1=0, dim2=2).movedim(2, 0)


def elimination_order(systems: Sequence[LinearSystem]) -> Tensor:
    """Return the dimensions of a group, the one that is needed least first.

    In a wide group several are dropped at once, so that all others are updated less often: one after the other, out of
    the candidates that are needed least.

    >>> x = torch.tensor([[1.0, 0, 1, 3], [0, 1, 1, 0], [2, 1, 3, 1], [1, 4, 5, 1]]).double()  # the third: sum of two
    >>> elimination_order([LinearSystem.of(torch.cov(x.T), torch.eye(4).double(), 1)])[0].item()
    0
    """
    left = torch.arange(len(systems[0].precision) // systems[0].size)
    at_once, order = max(1, int(len(left) * DROPPED_AT_ONCE)), []
    while len(left):
        dropped = _needed_least(systems, min(at_once, len(left)))
        order.append(left[dropped])
        if len(dropped) == len(left):
            break
        systems = [system.without(dropped) for system in systems]
        stays = torch.ones(len(left), dtype=torch.bool)
        stays[dropped] = False
        left = left[stays]
    return torch.cat(order)


def _needed_least(systems: Sequence[LinearSystem], count: int) -> Tensor:
    """Return `count` of the dimensions that are left, dropped one after the other."""
    candidates = _rises(systems).argsort(stable=True)[: CANDIDATES * count if count > 1 else 1]
    if count == 1:
        return candidates
    parts, left, dropped = [system.part(candidates) for system in systems], candidates, []
    for _ in range(count):
        first = _rises(parts).argmin(0, keepdim=True)
        dropped.append(left[first])
        left = left[torch.arange(len(left)) != first]
        if len(left):
            parts = [part.without(first) for part in parts]
    return torch.cat(dropped)


def _rises(systems: Sequence[LinearSystem]) -> Tensor:
    return torch.stack([system.rises() for system in systems]).sum(0)
