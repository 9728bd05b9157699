"""Random importance: the floor that every method has to clear."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..groups import Groups
from . import method


@method("random")
def random(model: nn.Module, groups: Groups, seed: int) -> dict[str, Tensor]:
    """Uniform random numbers from a seed of their own."""
    generator = torch.Generator().manual_seed(seed)
    return {group.name: torch.rand(group.width, generator=generator) for group in groups}
