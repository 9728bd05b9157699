"""Network slimming: train weights and scores together, with l1 on the scores.

Liu et al., Learning efficient convolutional networks through network slimming, ICCV 2017, eq. 1:

    min over w, s of  L(w, s) + gamma * sum |s|

With a number as gamma the score of a dimension is the scale of the batch norm that follows it, as in the paper. Its
importance is the sum over all such norms, as its cost is (a residual stream passes through many). Without such a norm,
and with `gamma: auto`, the score is a gate on the input columns of the layers that read the dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.recipe import HasKind, Ranking, only_inner_channels

from .base import Job, register_search
from .score_training import ScoredConfig, ScoredSearch, attach_gates
from .score_training.regularizer import ScorePositions


class NetslimConfig(ScoredConfig):
    """Joint training of weights and scores with l1 on the scores (Liu et al. 2017)."""

    method: Literal["netslim"] = "netslim"
    ranking: Ranking = Field(
        "auto",
        description="how importance is compared across groups. auto: cost; with a number as gamma, group if residual "
        "streams are pruned as well or the budget counts dimensions",
    )
    score: Literal["auto", "gate"] = Field(
        "auto", description="auto: with a number as gamma, the scale of batch norms where a group has any; else gates"
    )

    def ranking_for(self, groups: Iterable[HasKind], unit: str) -> Ranking:
        if self.ranking != "auto":
            return self.ranking
        return "cost" if self.gamma == "auto" or only_inner_channels(groups, unit) else "group"


@register_search("netslim")
class Netslim(ScoredSearch):
    """Weights and scores are trained on the same batches."""

    Config = NetslimConfig

    def attach_scores(self) -> ScorePositions:
        config, job = self.config, self.job
        scales = _batch_norm_scales(job) if config.score == "auto" and config.gamma != "auto" else {}
        return scales | attach_gates(job, [g for g in job.groups if g.name not in scales])

    def step(self, batch: Any) -> dict[str, Tensor]:
        self.begin_step()
        return self.step_jointly(batch)


def _batch_norm_scales(job: Job) -> ScorePositions:
    """Return the batch norm scales of each group that has any, with the positions of its dimensions."""
    modules = dict(job.model.named_modules())

    def trained_scale(path: str) -> nn.Parameter | None:
        owner, _, leaf = path.rpartition(".")
        module = modules[owner]
        weight = getattr(module, leaf)
        trained = isinstance(weight, nn.Parameter) and weight.requires_grad and weight.ndim == 1
        return weight if trained and leaf == "weight" and isinstance(module, nn.modules.batchnorm._BatchNorm) else None

    positions: ScorePositions = {}
    for group in job.groups:
        scales = [
            (scale, torch.as_tensor(slot.index, device=scale.device))
            for slot in group.slots
            if (scale := trained_scale(slot.tensor)) is not None
        ]
        if scales:
            positions[group.name] = scales
    return positions
