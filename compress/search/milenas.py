"""MiLeNAS: mixed-level search, the scores see both halves of the data.

He et al., MiLeNAS: efficient neural architecture search via mixed-level reformulation, CVPR 2020; Xue 2022 (2.23):

    w     <- w     - eta_w     grad_w L_a(w, alpha)
    alpha <- alpha - eta_alpha (grad_alpha L_a(w, alpha) + lambda grad_alpha L_p(w, alpha) + gamma grad P(alpha))
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from ..fields import Positive
from . import register_search
from .scored import Scored, ScoredConfig


class MilenasConfig(ScoredConfig):
    """Scores on both halves of the data, weights on one (He et al. 2020)."""

    method: Literal["milenas"] = "milenas"
    lambda_: Positive = Field(1.0, alias="lambda", description="weight of the half that the weights do not see")


@register_search("milenas")
class Milenas(Scored):
    """Alternate, scores on the mixed loss."""

    Config = MilenasConfig
    reads = 2

    def step(self, batch: Any) -> dict[str, Tensor]:
        primary, auxiliary = batch
        self.begin()
        loss_a, of_weights = self.gradients(auxiliary, self.weights)
        self.step_weights(of_weights)
        _, of_a = self.score_gradients(auxiliary)
        loss_p, of_p = self.score_gradients(primary, self.config.lambda_)
        penalty = self.step_scores([a + p for a, p in zip(of_a, of_p, strict=True)])
        return {"loss": loss_p + penalty, "task": loss_a, "penalty": penalty}
