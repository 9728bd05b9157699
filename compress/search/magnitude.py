"""Magnitude importance: the squared norm of the weights that a dimension is gated on.

Han et al., Learning both weights and connections for efficient neural networks, 2015, by group: for dimension u

    importance_u = sum over gated weights of ||W[:, u]||^2

These are the input columns of the layers that read the dimension, or the output rows of the layers that write it where
a product of activations or a norm reads it. The squares are summed over layers, as the cost of a dimension is: a
residual stream, which many layers read, has both a higher importance and a higher cost. Weights of different layers
differ in size. Where a dimension costs about the same in all groups, as in the ResNets for CIFAR, they are compared by
`lamp`. In a network for larger images a dimension of the first layers costs a hundred times as much as one of the last,
and importance per cost would empty the first layers: there, magnitudes are compared as they are, within bounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.graph import Group
from compress.modules import tensors_of
from compress.recipe import RANKING_DESCRIPTION, Ranking, SearchConfig

from .base import Search, register_search

CHUNK_ELEMENTS = 2**16  # squared at a time


class MagnitudeConfig(SearchConfig):
    """Squared norm of the weights that read a dimension; needs no data (Han et al. 2015)."""

    chooses_operations: ClassVar[bool] = True
    leaves_choice_to_repair: ClassVar[bool] = True
    method: Literal["magnitude"] = "magnitude"
    ranking: Ranking = Field("auto", description=RANKING_DESCRIPTION.format("balanced", "group"))


@register_search("magnitude")
class Magnitude(Search):
    """Squared norm of the weights that read a dimension."""

    Config = MagnitudeConfig

    def importance(self) -> dict[str, Tensor]:
        if self.job.operations is not None:  # the scores as they are
            return {name: a.detach().softmax(0).double().cpu() for name, a in self.job.operations.scores.items()}
        norms = squared_norms(self.job.model, self.job.groups)
        return {name: norm.double().cpu() for name, norm in norms.items()}


@torch.no_grad()
def squared_norms(model: nn.Module, groups: Iterable[Group]) -> dict[str, Tensor]:
    """Return the squared norm of the gated weights of each dimension, without the scores of attached gates."""
    tensors = tensors_of(model)
    norms = {}
    for group in groups:
        total = torch.zeros((), dtype=torch.float64)
        for slot in group.gated_slots:
            path, _, leaf = slot.tensor.rpartition(".")
            original = f"{path}.parametrizations.{leaf}.original".removeprefix(".")
            weight = tensors[original if original in tensors else slot.tensor]
            squares = _sum_of_squares(weight, slot.dim).double()
            total = total.to(squares) + squares[torch.as_tensor(slot.index, device=squares.device)].sum(1)
        norms[group.name] = total
    return norms


def _sum_of_squares(weight: Tensor, dim: int) -> Tensor:
    """Return the sum of squares at each position along `dim`; a few rows at a time, which stay in the cache."""
    others = [d for d in range(weight.ndim) if d != dim]
    if not others:
        return weight.square()
    rows = max(1, CHUNK_ELEMENTS * len(weight) // max(weight.numel(), 1))
    chunks = torch.split(weight, rows)
    if dim == 0:
        return torch.cat([chunk.square().sum(others) for chunk in chunks])
    total = weight.new_zeros(weight.shape[1:])
    for chunk in chunks:
        total += chunk.square().sum(0)
    remaining = [d - 1 for d in others if d]
    return total.sum(remaining) if remaining else total
