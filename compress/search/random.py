"""Random importance: a baseline for other searches."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from compress.recipe import SearchConfig

from .base import Search, register_search


class RandomConfig(SearchConfig):
    """Random importance, as a baseline."""

    method: Literal["random"] = "random"


@register_search("random")
class Random(Search):
    """Uniform random importance, drawn from the recipe's seed."""

    Config = RandomConfig

    def importance(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.job.seed)
        return {group.name: torch.rand(group.width, generator=generator) for group in self.job.groups}
