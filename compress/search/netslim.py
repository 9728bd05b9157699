"""Network slimming: train weights and scores together, with l1 on the scores.

Liu et al., Learning efficient convolutional networks through network slimming, ICCV 2017, eq. 1:

    min over w, s of  L(w, s) + gamma * sum |s|

With a number as gamma the score of a dimension is the scale of the batch norm it passes through, as in the paper, and
its importance the sum over all such norms, as its cost is (a residual stream passes through many). Where there is no
such norm, and with `gamma: auto`, the score is a gate on the columns that read the dimension.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ..groups import Group, Groups
from . import Job, Ranking, inner, register_search
from .penalty import Places
from .scored import Scored, ScoredConfig, gates


class NetslimConfig(ScoredConfig):
    """Joint training of weights and scores with l1 on the scores (Liu et al. 2017)."""

    method: Literal["netslim"] = "netslim"
    ranking: Ranking = Field(
        "auto",
        description="across groups: auto is cost, but with a number as gamma group where streams are cut too or the "
        "budget counts dimensions",
    )
    score: Literal["auto", "gate"] = Field(
        "auto", description="auto: with a number as gamma, the scale of batch norms where a group has any"
    )

    def ranks_by(self, groups: Groups, unit: str) -> Ranking:
        if self.ranking != "auto":
            return self.ranking
        return "cost" if self.gamma == "auto" or inner(groups, unit) else "group"


@register_search("netslim")
class Netslim(Scored):
    """Weights and scores on the same batches."""

    Config = NetslimConfig

    def attach(self) -> Places:
        config, job = self.config, self.job
        scales = _scales(job) if config.score == "auto" and config.gamma != "auto" else {}
        return scales | gates(job, [g for g in job.groups if g.name not in scales])

    def step(self, batch: Any) -> dict[str, Tensor]:
        self.begin()
        return self.step_together(batch)


def _scales(job: Job) -> Places:
    """Group -> the batch norms' scales it passes through, with the positions of each of its dimensions."""
    modules = dict(job.model.named_modules())
    found: Places = {}

    def scale(path: str) -> nn.Parameter | None:
        owner, _, leaf = path.rpartition(".")
        module = modules[owner]
        weight = getattr(module, leaf)
        trained = isinstance(weight, nn.Parameter) and weight.requires_grad and weight.ndim == 1
        return weight if trained and leaf == "weight" and isinstance(module, nn.modules.batchnorm._BatchNorm) else None

    def places(group: Group) -> list[tuple[nn.Parameter, Tensor]]:
        return [
            (w, torch.as_tensor(s.index, device=w.device)) for s in group.slots if (w := scale(s.tensor)) is not None
        ]

    for group in job.groups:
        if here := places(group):
            found[group.name] = here
    return found
