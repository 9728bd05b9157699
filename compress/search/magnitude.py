"""Magnitude: a dimension is worth the size of the weights that read it, or write it where a product reads it.

Han et al., Learning both weights and connections for efficient neural networks, 2015, by group: for dimension u

    importance_u = sum over readers of ||W[:, u]||^2

The squares add up over readers, as the cost of a dimension does: a residual stream, which many read, is worth and costs
more. Weights of different layers are of different size, so layers are compared by `lamp`; as they are, or per cost, a
strong cut empties whole layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ..groups import Group
from ..walk import tensors_of
from . import RANKING, Ranking, Search, SearchConfig, register_search

CHUNK = 2**16


class MagnitudeConfig(SearchConfig):
    """The squared norm of the columns that read a dimension; needs no data."""

    method: Literal["magnitude"] = "magnitude"
    ranking: Ranking = Field("auto", description=RANKING.format("group"))


@register_search("magnitude")
class Magnitude(Search):
    """The squared norm of the columns that read a dimension."""

    Config = MagnitudeConfig

    def importance(self) -> dict[str, Tensor]:
        return {name: size.double().cpu() for name, size in sizes(self.job.model, self.job.groups).items()}


@torch.no_grad()
def sizes(model: nn.Module, groups: Iterable[Group]) -> dict[str, Tensor]:
    """The squared norm of the columns that read each dimension, whatever gates are on them."""
    tensors = tensors_of(model)
    found = {}
    for group in groups:
        total = torch.zeros((), dtype=torch.float64)
        for slot in group.readers:
            path, _, leaf = slot.tensor.rpartition(".")
            gated = f"{path}.parametrizations.{leaf}.original".removeprefix(".")
            weight = tensors[gated if gated in tensors else slot.tensor]
            square = _squares(weight, slot.dim).double()
            total = total.to(square) + square[torch.as_tensor(slot.index, device=square.device)].sum(1)
        found[group.name] = total
    return found


def _squares(weight: Tensor, dim: int) -> Tensor:
    """The sum of squares at each position along `dim`, a few rows at a time: what is squared stays in the cache."""
    others = [d for d in range(weight.ndim) if d != dim]
    if not others:
        return weight.square()
    rows = max(1, CHUNK * len(weight) // max(weight.numel(), 1))
    parts = torch.split(weight, rows)
    if dim == 0:
        return torch.cat([part.square().sum(others) for part in parts])
    total = weight.new_zeros(weight.shape[1:])
    for part in parts:
        total += part.square().sum(0)
    rest = [d - 1 for d in others if d]
    return total.sum(rest) if rest else total
