"""Sharing of meta weights between the candidates of a layer: P and Q, their level Phi, and annealing.

For a meta weight W and matrices with orthonormal columns, the weight of output width o and input width i of a layer is

    W'[x, y] = sum over i, j of P_o[i, x] Q_i[j, y] W[i, j]                        (6)

and two choices share

    phi(i, o; i2, o2) = ||Q_i^T Q_i2||_F^2 ||P_o^T P_o2||_F^2                      (9)
    Phi = sum over all pairs = (sum ||Q_i^T Q_i2||_F^2) (sum ||P_o^T P_o2||_F^2)   (10)

Side by side, A = [P_1 .. P_K], the second sum is ||A^T A||_F^2. Nested columns (P_o holds the first columns of the unit
matrix) share most; disjoint blocks share nothing. The meta weight is as wide as all candidates together, so that
disjoint blocks always exist: those of A are the unit matrix, the largest candidate first.

Annealing goes from the first to the second by gradient steps on sum |offdiag(A^T A)|, and restores the norms:

    A <- normalize(A - rate A S),  S = sign(offdiag(A^T A))

Within `rate` of zero the sign is linear, or the steps would oscillate there. The first columns are equal, and
a small component of each towards its own block tells them in which direction to part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SEPARATION = 1e-3  # initial component of a column in its own block
UPDATES, RATE, TURN = 600, 0.02, 10  # annealing: number of updates, their rate, and how many of Q follow on those of P


def nested_columns(widths: Sequence[int]) -> Tensor:
    """Return A whose candidates are prefixes of the largest; the largest candidate comes first."""
    within = positions_in_block(widths)
    return torch.eye(len(within), dtype=torch.float64)[:, within].contiguous()


def disjoint_columns(widths: Sequence[int]) -> Tensor:
    """Return A whose candidates have no row in common."""
    return torch.eye(sum(widths), dtype=torch.float64)


def positions_in_block(widths: Sequence[int]) -> Tensor:
    """Return the position of each column of A within its candidate."""
    return torch.cat([torch.arange(width) for width in sorted(widths, reverse=True)])


def separated(a: Tensor) -> Tensor:
    """Return A with a small component of each column in its own block."""
    return _normalized(a + SEPARATION * torch.eye(len(a), dtype=a.dtype, device=a.device))


def shared_sum(a: Tensor) -> Tensor:
    """Return one factor of Phi: the sum of ||P_o^T P_o2||_F^2 over all pairs of candidates."""
    return (a.T @ a).square().sum()


def nested_sum(widths: Sequence[int]) -> int:
    """Return the largest value of `shared_sum`.

    >>> nested_sum([4, 8, 16, 32, 64]), sum([4, 8, 16, 32, 64])
    (332, 124)
    """
    return sum(min(a, b) for a in widths for b in widths)


@torch.no_grad()
def anneal_(a: Tensor, rate: float = RATE) -> None:
    """Make one annealing update of A, or of each matrix of a batch."""
    gram = a.mT @ a
    gram.diagonal(dim1=-2, dim2=-1).zero_()
    a.copy_(_normalized(a - rate * (a @ (gram / rate).clamp(-1, 1))))


@torch.no_grad()
def anneal_by_position_(a: Tensor, widths: Sequence[int]) -> None:
    """Make one annealing update of an A that was nested at first, in linear instead of cubic time.

    Columns at different positions of their candidates are zero where the other is not, and stay so: A is one small
    matrix for each position.
    """
    for columns in columns_by_position(widths):
        index = columns.to(a.device)
        where = index[:, :, None], index[:, None, :]
        part = a[where]
        anneal_(part)
        a[where] = part


def columns_by_position(widths: Sequence[int]) -> list[Tensor]:
    """Return the columns of A at each position: a tensor of (positions, candidates) for each number of candidates.

    >>> [columns.tolist() for columns in columns_by_position([1, 3])]
    [[[1], [2]], [[0, 3]]]
    """
    ends = [*sorted(widths, reverse=True), 0]
    starts = torch.tensor([0, *ends[:-2]]).cumsum(0)
    parts = [torch.arange(ends[k + 1], ends[k])[:, None] + starts[: k + 1] for k in range(len(widths))]
    return [part for part in parts if len(part)]


def _normalized(a: Tensor) -> Tensor:
    normalized: Tensor = a / torch.linalg.vector_norm(a, dim=-2, keepdim=True)
    return normalized
