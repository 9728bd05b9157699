"""MiLeNAS: mixed-level search, in which the scores are trained on both halves of the data.

He et al., MiLeNAS: efficient neural architecture search via mixed-level reformulation, CVPR 2020; Xue 2022 (2.23):

    w     <- w     - eta_w     grad_w L_a(w, alpha)
    alpha <- alpha - eta_alpha (grad_alpha L_a(w, alpha) + lambda grad_alpha L_p(w, alpha) + gamma grad P(alpha))
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from compress.recipe import Positive

from .base import register_search
from .score_training import ScoredConfig, ScoredSearch


class MilenasConfig(ScoredConfig):
    """Scores on both halves of the data, weights on one (He et al. 2020)."""

    method: Literal["milenas"] = "milenas"
    lambda_: Positive = Field(1.0, alias="lambda", description="weight of the half that the weights are not trained on")


@register_search("milenas")
class Milenas(ScoredSearch):
    """Alternating steps, with the scores on the mixed loss."""

    Config = MilenasConfig
    batches_per_step = 2

    def step(self, batch: Any) -> dict[str, Tensor]:
        primary, auxiliary = batch
        self.begin_step()
        loss_a, weight_gradients = self.gradients(auxiliary, self.weights)
        self.step_weights(weight_gradients)
        _, auxiliary_gradients = self.score_gradients(auxiliary, half="auxiliary")
        loss_p, primary_gradients = self.score_gradients(primary, self.config.lambda_, half="primary")
        penalty = self.step_scores([a + p for a, p in zip(auxiliary_gradients, primary_gradients, strict=True)])
        return {"loss": loss_p + penalty, "task": loss_a, "penalty": penalty}
