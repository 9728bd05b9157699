"""Magnitude: a dimension is worth the size of the weights that read it.

Han et al., Learning both weights and connections for efficient neural networks, 2015, by group: for dimension u

    importance_u = sqrt(sum over readers of ||W[:, u]||^2), divided by the mean over the group

The division makes groups of different depth and fan-out comparable; without it a global ranking empties whole layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..groups import Groups
from . import method

CHUNK = 2**22


@method("magnitude")
@torch.no_grad()
def magnitude(model: nn.Module, groups: Groups, seed: int) -> dict[str, Tensor]:
    """The l2 norm of the columns that read a dimension, relative to its group."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    found = {}
    for group in groups:
        total = torch.zeros(group.width, dtype=torch.float64)
        for slot in group.readers:
            weight = tensors[slot.tensor]
            total += _squares(weight, slot.dim).double().cpu()[torch.as_tensor(slot.index)].sum(1)
        sizes = total.sqrt()
        found[group.name] = sizes / sizes.mean().clamp_min(torch.finfo(sizes.dtype).tiny)
    return found


def _squares(weight: Tensor, dim: int) -> Tensor:
    """The sum of squares at each position along `dim`, some rows at a time to save memory."""
    others = [d for d in range(weight.ndim) if d != dim]
    if dim == 0:
        return weight.square().sum(others)
    rows = max(1, CHUNK * len(weight) // weight.numel())
    parts = [part.square().sum(others) for part in torch.split(weight, rows)]
    return torch.stack(parts).sum(0)
