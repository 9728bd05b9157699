"""Random importance: the floor that every method has to clear."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from . import Search, SearchConfig, register_search


class RandomConfig(SearchConfig):
    """Importance drawn at random."""

    method: Literal["random"] = "random"


@register_search("random")
class Random(Search):
    """Uniform random numbers from a seed of their own."""

    Config = RandomConfig

    def importance(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.job.seed)
        return {group.name: torch.rand(group.width, generator=generator) for group in self.job.groups}
