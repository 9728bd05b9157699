"""Diagnostics of weight sharing: how the gradients of a group's candidates agree, and how they are coupled.

The width of one group is varied, all others stay. Candidate k has the gradient g_k in the weights of the group. The
cosine of two candidates tells whether they pull the shared weights in the same direction. What the others contribute
to the weights of candidate k is the coupled gradient

    T_k(sum over j != k of g_j)

where T_k projects to the candidate's own weights. The paper (appendix C) adds up the gradients of an epoch before; here
every candidate contributes one gradient on the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from .projections import Side

Gradients = list[Tensor]
ToCandidate = Callable[[int, Gradients], Gradients]  # candidate, gradients -> those of its own weights


@dataclass(frozen=True)
class GroupWeight:
    """A weight with the dimensions of a group along `dim`: projected by `side`, or gated at `positions`."""

    weight: Tensor
    dim: int
    side: Side | None = None
    positions: Tensor | None = None  # (width of the group, positions per dimension)


class Coupling(NamedTuple):
    """Mean cosine between the gradients of two candidates, and mean norm of the coupled gradients."""

    cosine: Tensor
    norm: Tensor


@torch.no_grad()
def measure_coupling(gradients: Sequence[Gradients], to_candidate: ToCandidate) -> Coupling:
    """Return the coupling of candidates with these gradients, one list per candidate."""
    flat = [torch.cat([g.flatten() for g in tensors]) for tensors in gradients]
    pairs = list(combinations(flat, 2))
    cosines = [torch.nn.functional.cosine_similarity(a, b, dim=0) for a, b in pairs]
    total = [torch.stack(parts).sum(0) for parts in zip(*gradients, strict=True)]
    norms = []
    for k, own in enumerate(gradients):
        others = to_candidate(k, [t - g for t, g in zip(total, own, strict=True)])
        norms.append(torch.cat([g.flatten() for g in others]).norm())
    return Coupling(torch.stack(cosines).mean(), torch.stack(norms).mean())


def to_candidate(k: int, kept: Tensor, gradients: Gradients, weights: Sequence[GroupWeight]) -> Gradients:
    """Return the part of gradients that concerns the own weights of candidate k.

    Args:
        kept: the dimensions of the group that the candidate keeps.
        weights: those that the gradients belong to.
    """
    own = []
    for gradient, part in zip(gradients, weights, strict=True):
        rows = gradient.movedim(part.dim, 0).flatten(1)
        if part.side is not None:
            matrix = part.side.matrix(torch.full((1,), k, device=rows.device))
            own.append(matrix.to(rows.dtype).T @ rows)
        elif part.positions is not None:
            factors = rows.new_zeros(len(rows))
            factors[part.positions] = kept.to(rows.dtype)[:, None].expand_as(part.positions)
            own.append(rows * factors[:, None])
    return own
