"""Random importance: a baseline for other searches."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from compress.recipe import SearchConfig

from .base import Search, register_search


class RandomConfig(SearchConfig):
    """Random importance, as a baseline."""

    chooses_operations: ClassVar[bool] = True
    method: Literal["random"] = "random"


@register_search("random")
class Random(Search):
    """Uniform random importance, drawn from the recipe's seed."""

    Config = RandomConfig

    def importance(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.job.seed)
        return {name: torch.rand(count, generator=generator) for name, count in self.job.num_scores.items()}
