"""Magnitude: a dimension is worth the size of the weights that read it.

Han et al., Learning both weights and connections for efficient neural networks, 2015, by group: for dimension u

    importance_u = sqrt(sum over readers of ||W[:, u]||^2)

Ranked relative to the group's mean by default: that makes groups of different depth and fan-out comparable; without it
a global ranking empties whole layers.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from . import RANKING, Ranking, Search, SearchConfig, register_search

CHUNK = 2**22


class MagnitudeConfig(SearchConfig):
    """The l2 norm of the columns that read a dimension; needs no data."""

    method: Literal["magnitude"] = "magnitude"
    ranking: Ranking = Field("group", description=RANKING)


@register_search("magnitude")
class Magnitude(Search):
    """The l2 norm of the columns that read a dimension."""

    Config = MagnitudeConfig

    @torch.no_grad()
    def importance(self) -> dict[str, Tensor]:
        model = self.job.model
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        found = {}
        for group in self.job.groups:
            total = torch.zeros(group.width, dtype=torch.float64)
            for slot in group.readers:
                weight = tensors[slot.tensor]
                total += _squares(weight, slot.dim).double().cpu()[torch.as_tensor(slot.index)].sum(1)
            found[group.name] = total.sqrt()
        return found


def _squares(weight: Tensor, dim: int) -> Tensor:
    """The sum of squares at each position along `dim`, some rows at a time to save memory."""
    others = [d for d in range(weight.ndim) if d != dim]
    if dim == 0:
        return weight.square().sum(others)
    rows = max(1, CHUNK * len(weight) // weight.numel())
    parts = [part.square().sum(others) for part in torch.split(weight, rows)]
    return torch.stack(parts).sum(0)
