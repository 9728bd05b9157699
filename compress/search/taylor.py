"""Taylor: a dimension is worth what the loss would change without it.

Molchanov et al., Importance estimation for neural network pruning, CVPR 2019, eq. 8, with a gate of 1 on each
dimension:

    importance_u = sum over batches of (alpha_u dL/dalpha_u)^2,  alpha_u = 1

Nothing is trained: weights and scores stay as they are, and the batches are read in eval mode.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..fields import Length
from ..gates import attach_
from . import RANKING, Job, Ranking, Search, SearchConfig, register_search


class TaylorConfig(SearchConfig):
    """The squared first-order change of the loss without a dimension (Molchanov et al. 2019)."""

    method: Literal["taylor"] = "taylor"
    ranking: Ranking = Field("auto", description=RANKING.format("cost"))
    epochs: Length = Field(
        default_factory=lambda: Length(count=50, unit="steps"), description="how much data is read: 1, or 50 steps"
    )

    @property
    def otherwise(self) -> Ranking:
        return "cost"


@register_search("taylor")
class Taylor(Search):
    """Squared gradients of the gates."""

    Config = TaylorConfig
    trains = False

    def __init__(self, config: TaylorConfig, job: Job) -> None:
        super().__init__(config, job)
        self.gates = attach_(job.model, job.groups)
        self.sums = [torch.zeros_like(gate) for gate in self.gates.values()]

    def step(self, batch: Any) -> dict[str, Tensor]:
        self.done += 1
        task, model = self.job.task, self.job.model
        found = self.job.compute.gradients(
            lambda piece: {"loss": task.loss(task.forward(model, piece), piece)}, batch, list(self.gates.values())
        )
        for total, gate, g in zip(self.sums, self.gates.values(), found.gradients, strict=True):
            total.add_((gate.detach() * g).square())
        return found.terms

    def importance(self) -> dict[str, Tensor]:
        return dict(zip(self.gates, self.sums, strict=True))

    def state(self) -> dict[str, Tensor]:
        return {f"sum{i}": total for i, total in enumerate(self.sums)}
