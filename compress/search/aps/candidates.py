"""Candidate widths of every group, and the dimensions that a width keeps: the first ones by magnitude."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.budget import WidthBounds
from compress.graph import Groups

from ..magnitude import squared_norms


def candidate_widths(groups: Groups, candidates: Sequence[int | float], bounds: WidthBounds) -> list[list[int]]:
    """Return the candidate widths of each group, in increasing order and each once.

    Integers are numbers of dimensions, others fractions of the group's width. They are rounded up to a multiple of
    `round_to` and limited by the bounds of the group, so a group may have fewer candidates than the recipe names.
    """
    widths = []
    for i, width in enumerate(groups.cost.widths.tolist()):
        least, most, multiple = (int(b[i]) for b in (bounds.least_if_kept, bounds.most, bounds.multiple))
        wanted = [c if isinstance(c, int) else math.ceil(c * width - 1e-9) for c in candidates]
        widths.append(sorted({min(-(-max(c, least) // multiple) * multiple, most) for c in wanted}))
    return widths


@torch.no_grad()
def magnitude_ranks(model: nn.Module, groups: Groups) -> list[Tensor]:
    """Return the rank of every dimension of each group by the norm of its gated weights; the largest has rank 0.

    With several heads, the dimensions of each head are ranked separately, in steps of the number of heads, so that a
    width keeps equally many of each.
    """
    ranks = []
    for group, norms in zip(groups, squared_norms(model, groups).values(), strict=True):
        order = norms.view(group.num_heads, -1).argsort(dim=1, descending=True, stable=True)
        ranks.append((order.argsort(dim=1) * group.num_heads).view(-1))
    return ranks


@dataclass(frozen=True, eq=False)
class WidthTable:
    """The candidates of all groups as tensors on one device; a choice is the index of a candidate."""

    widths: Tensor  # (groups, candidates), padded with the largest candidate of a group
    counts: Tensor  # candidates of each group
    sizes: list[int]  # dimensions of each group
    group_of_dimension: Tensor  # of the dimensions of all groups, one group after the other
    ranks: Tensor  # of the same dimensions, within their groups

    @classmethod
    def of(cls, candidates: Sequence[Sequence[int]], ranks: Sequence[Tensor]) -> WidthTable:
        """Build the table of these candidates and ranks."""
        device, most = ranks[0].device, max(map(len, candidates))
        padded = [[*widths, *[widths[-1]] * (most - len(widths))] for widths in candidates]
        sizes = [len(rank) for rank in ranks]
        owners = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        return cls(
            torch.tensor(padded).to(device),
            torch.tensor([len(widths) for widths in candidates]).to(device),
            sizes,
            owners.to(device),
            torch.cat([*ranks]),
        )

    def uniform_choices(self, numbers: Tensor) -> Tensor:
        """Return choices of equal probability from numbers in [0, 1), one for each group."""
        return torch.minimum((numbers * self.counts).long(), self.counts - 1)

    def widths_of(self, choices: Tensor) -> Tensor:
        """Return the widths of choices (..., groups)."""
        return self.widths.expand(*choices.shape, -1).gather(-1, choices[..., None])[..., 0]

    def masks(self, choices: Tensor) -> list[Tensor]:
        """Return 1 for the dimensions of each group that its chosen width keeps, else 0."""
        kept = self.ranks < self.widths_of(choices)[self.group_of_dimension]
        return list(torch.split(kept, self.sizes))

    def ranks_by_group(self) -> list[Tensor]:
        """Return the ranks of the dimensions of each group."""
        return list(torch.split(self.ranks, self.sizes))

    def importance(self, probabilities: Tensor) -> list[Tensor]:
        """Return the importance of every dimension: the probability of the candidates that keep it.

        For rank r it is the sum of p(c_k) over c_k > r. Equal values are ordered by r relative to the width.
        """
        values = []
        for g, rank in enumerate(self.ranks_by_group()):
            kept = self.widths[g, :, None] > rank  # (candidates, dimensions)
            tie = 1e-6 * (1 - rank.double() / len(rank))
            values.append(probabilities[g].double() @ kept.double() + tie)
        return values
