"""Taylor importance: the estimated change of the loss if a dimension is removed.

Molchanov et al., Importance estimation for neural network pruning, CVPR 2019, eq. 8, with a gate of 1 on each
dimension:

    importance_u = sum over batches of (alpha_u dL/dalpha_u)^2,  alpha_u = 1

Nothing is trained: weights and scores stay as they are. Each step runs in eval mode, whatever the mode of the model:
batch norms use their running statistics and do not update them, and dropout is off.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.modules import module_mode
from compress.recipe import RANKING_DESCRIPTION, Length, Ranking, SearchConfig
from compress.surgery import attach_

from .base import Job, Search, register_search


class TaylorConfig(SearchConfig):
    """Squared first-order change of the loss if a dimension is removed (Molchanov et al. 2019)."""

    leaves_choice_to_repair: ClassVar[bool] = True
    method: Literal["taylor"] = "taylor"
    ranking: Ranking = Field("auto", description=RANKING_DESCRIPTION.format("cost", "cost"))
    epochs: Length = Field(
        default_factory=lambda: Length(count=50, unit="steps"), description="amount of data to read: 1, or 50 steps"
    )

    @property
    def channel_ranking(self) -> Ranking:
        return "cost"

    @property
    def fallback_ranking(self) -> Ranking:
        return "cost"


@register_search("taylor")
class Taylor(Search):
    """Sum of squared gradients of the gates."""

    Config = TaylorConfig
    trains = False

    def __init__(self, config: TaylorConfig, job: Job) -> None:
        super().__init__(config, job)
        self.gates = attach_(job.model, job.groups)
        self.sums = [torch.zeros_like(gate) for gate in self.gates.values()]

    def step(self, batch: Any) -> dict[str, Tensor]:
        self.done += 1
        task, model = self.job.task, self.job.model

        def terms(micro_batch: Any) -> dict[str, Tensor]:
            return {"loss": task.loss(task.forward(model, micro_batch), micro_batch)}

        with module_mode(model, training=False):
            gates, counts = list(self.gates.values()), {"loss": task.count_targets}
            result = self.job.gradient_computer.gradients(terms, batch, gates, counts=counts)
        for total, gate, gradient in zip(self.sums, self.gates.values(), result.gradients, strict=True):
            total.add_((gate.detach() * gradient).square())
        return result.terms

    def importance(self) -> dict[str, Tensor]:
        return dict(zip(self.gates, self.sums, strict=True))

    def state(self) -> dict[str, Tensor]:
        return {f"sum{i}": total for i, total in enumerate(self.sums)}
