"""DARTS for widths: weights are trained on one half of the data, scores on the other.

Liu et al., DARTS: differentiable architecture search, ICLR 2019. With L_a on the half that trains weights and L_p on
the other, as in Xue 2022 (2.21), the first order makes the steps

    w     <- w     - eta_w     grad_w L_a(w, alpha)
    alpha <- alpha - eta_alpha (grad_alpha L_p(w, alpha) + gamma grad P(alpha))

The second order looks a step xi = eta_w ahead, w' = w - xi grad_w L_a(w, alpha), before w is stepped:

    grad_alpha L_p(w', alpha) - xi (grad_alpha L_a(w+, alpha) - grad_alpha L_a(w-, alpha)) / (2 eps)
    w+- = w +- eps grad_w' L_p(w', alpha),  eps = 0.01 / ||grad_w' L_p(w', alpha)||
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .base import register_search
from .score_training import ScoredConfig, ScoredSearch

COST_INTERVAL = 4  # steps of the first order between two measurements of the costs on the half for the weights


class Darts1Config(ScoredConfig):
    """First-order DARTS: scores on one half of the data, weights on the other (Liu et al. 2019)."""

    method: Literal["darts1"] = "darts1"


class Darts2Config(ScoredConfig):
    """Second-order DARTS, by finite differences (Liu et al. 2019)."""

    method: Literal["darts2"] = "darts2"


@register_search("darts1")
class Darts1(ScoredSearch):
    """Alternating steps, first order."""

    Config = Darts1Config
    batches_per_step = 2

    def step(self, batch: Any) -> dict[str, Tensor]:
        primary, auxiliary = batch
        self.begin_step()
        # The scores are not differentiated in this pass, so that their costs are extra work.
        half = "auxiliary" if self.done % COST_INTERVAL == 1 else None
        loss_a, weight_gradients = self.gradients(auxiliary, self.weights, half=half)
        self.step_weights(weight_gradients)
        loss_p, score_gradients = self.score_gradients(primary, half="primary")
        penalty = self.step_scores(score_gradients)
        return {"loss": loss_p + penalty, "task": loss_a, "penalty": penalty}


@register_search("darts2")
class Darts2(ScoredSearch):
    """Alternating steps, second order: the gradient of the scores goes through a step of the weights."""

    Config = Darts2Config
    batches_per_step = 2

    def step(self, batch: Any) -> dict[str, Tensor]:
        primary, auxiliary = batch
        self.begin_step()
        loss_a, weight_gradients = self.gradients(auxiliary, self.weights)
        loss_p, score_gradients = self.look_ahead(primary, auxiliary, weight_gradients)
        penalty = self.step_scores(score_gradients)
        self.step_weights(self.gradients(auxiliary, self.weights)[1])
        return {"loss": loss_p + penalty, "task": loss_a, "penalty": penalty}

    def look_ahead(self, primary: Any, auxiliary: Any, weight_gradients: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return L_p(w', alpha) and its second-order gradient in the scores; the weights are restored."""
        xi = self.optimizer.param_groups[0]["lr"]
        before = [w.detach().clone() for w in self.weights]
        self._set_weights([b - xi * g for b, g in zip(before, weight_gradients, strict=True)])
        loss, gradients = self.gradients(primary, [*self.weights, *self.alpha], half="primary")
        direction, score_gradients = gradients[: len(self.weights)], gradients[len(self.weights) :]
        norm = torch.stack(torch._foreach_norm(direction)).norm()
        eps = 0.01 / norm.clamp_min(1e-12)
        shifted_gradients = []
        for sign in (1.0, -1.0):
            self._set_weights([b + sign * eps * d for b, d in zip(before, direction, strict=True)])
            # The mean of both is the gradient at the weights between them.
            shifted_gradients.append(self.score_gradients(auxiliary, half="auxiliary")[1])
        self._set_weights(before)
        mixed = [(plus - minus) / (2 * eps) for plus, minus in zip(*shifted_gradients, strict=True)]
        return loss, [g - xi * m for g, m in zip(score_gradients, mixed, strict=True)]

    @torch.no_grad()
    def _set_weights(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(list(self.weights), values)
