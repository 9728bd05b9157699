"""DARTS for widths: weights on one half of the data, scores on the other.

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

from . import register_search
from .scored import Scored, ScoredConfig


class Darts1Config(ScoredConfig):
    """First-order DARTS: scores on one half of the data, weights on the other (Liu et al. 2019)."""

    method: Literal["darts1"] = "darts1"


class Darts2Config(ScoredConfig):
    """Second-order DARTS, by finite differences (Liu et al. 2019)."""

    method: Literal["darts2"] = "darts2"


@register_search("darts1")
class Darts1(Scored):
    """Alternate, first order."""

    Config = Darts1Config
    reads = 2

    def step(self, batch: Any) -> dict[str, Tensor]:
        primary, auxiliary = batch
        self.begin()
        loss_a, of_weights = self.gradients(auxiliary, self.weights)
        self.step_weights(of_weights)
        loss_p, of_alpha = self.score_gradients(primary)
        penalty = self.step_scores(of_alpha)
        return {"loss": loss_p + penalty, "task": loss_a, "penalty": penalty}


@register_search("darts2")
class Darts2(Scored):
    """Alternate, second order: the scores' gradient through a step of the weights."""

    Config = Darts2Config
    reads = 2

    def step(self, batch: Any) -> dict[str, Tensor]:
        primary, auxiliary = batch
        self.begin()
        loss_a, of_weights = self.gradients(auxiliary, self.weights)
        loss_p, of_alpha = self.look_ahead(primary, auxiliary, of_weights)
        penalty = self.step_scores(of_alpha)
        self.step_weights(self.gradients(auxiliary, self.weights)[1])
        return {"loss": loss_p + penalty, "task": loss_a, "penalty": penalty}

    def look_ahead(self, primary: Any, auxiliary: Any, of_weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """L_p a step ahead, and its gradient with respect to the scores; the weights are put back."""
        ahead = self.optimizer.param_groups[0]["lr"]
        before = [w.detach().clone() for w in self.weights]
        self._put([b - ahead * g for b, g in zip(before, of_weights, strict=True)])
        loss, both = self.gradients(primary, [*self.weights, *self.alpha])
        direction, of_alpha = both[: len(self.weights)], both[len(self.weights) :]
        size = torch.stack(torch._foreach_norm(direction)).norm()
        eps = 0.01 / size.clamp_min(1e-12)
        sides = []
        for sign in (1.0, -1.0):
            self._put([b + sign * eps * d for b, d in zip(before, direction, strict=True)])
            sides.append(self.score_gradients(auxiliary)[1])
        self._put(before)
        mixed = [(p - m) / (2 * eps) for p, m in zip(*sides, strict=True)]
        return loss, [g - ahead * m for g, m in zip(of_alpha, mixed, strict=True)]

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(list(self.weights), values)
