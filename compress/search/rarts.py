"""RARTS: relaxed architecture search, two sets of weights that share the scores.

F. Xue, Relaxation and Optimization for Automated Learning of Neural Network Architectures, 2022, chapter 2. With the
data in halves D_p and D_a, primary weights u and auxiliary weights w, the regularised Lagrangian (2.11) is

    L(u, w, alpha) = L_p(u, alpha) + lambda L_a(w, alpha) + beta / 2 ||u - w||^2 + gamma P(alpha)

and each iteration (2.12), (2.34) makes three steps, each with what the one before found (Gauss-Seidel):

    w     <- w     - eta_w     (lambda grad_w L_a(w, alpha) + beta (w - u))
    u     <- u     - eta_u     (grad_u L_p(u, alpha) + beta (u - w))
    alpha <- alpha - eta_alpha (lambda grad_alpha L_a(w, alpha) + grad_alpha L_p(u, alpha) + gamma grad P(alpha))

The weights kept are w (algorithm 3). `update: fused` takes the gradient of alpha from the backward passes of the first
two steps, at the old w and u: half of the passes, and no longer the Gauss-Seidel iteration that theorem 2.2 is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ..fields import NotNegative, Positive
from ..optimise import optimiser, rate, set_rate
from . import Job, register_search
from .scored import Rates, Scored, ScoredConfig


class RartsConfig(ScoredConfig):
    """Two sets of weights on two halves of the data, one set of scores (Xue 2022)."""

    method: Literal["rarts"] = "rarts"
    lambda_: Positive = Field(1.0, alias="lambda", description="weight of the auxiliary loss")
    beta: NotNegative = Field(1e-2, description="strength of the bond between the two sets of weights")
    u: Rates = Field(default_factory=lambda: Rates(), description="training of the primary weights")
    start: Literal["equal", "apart"] = Field("equal", description="apart: u begins with noise of a hundredth added")
    update: Literal["exact", "fused"] = "exact"


@register_search("rarts")
class Rarts(Scored):
    """Network splitting and data splitting."""

    Config = RartsConfig
    reads = 2

    def __init__(self, config: RartsConfig, job: Job) -> None:
        super().__init__(config, job)
        self.u = [nn.Parameter(w.detach().clone()) for w in self.weights]
        self.buffers = list(job.model.buffers())
        self.u_buffers = [b.clone() for b in self.buffers]
        if config.start == "apart":
            with torch.no_grad():
                for u in self.u:
                    u.add_(0.01 * u.std(unbiased=False) * torch.randn_like(u))
        self.u_rates = config.u.over(config)
        self.u_optimizer = optimiser(self.u_rates, self.u)
        self.optimizers = [*self.optimizers, self.u_optimizer]

    def state(self) -> dict[str, Tensor]:
        mine = {f"u{i}": u for i, u in enumerate(self.u)} | {f"buffer{i}": b for i, b in enumerate(self.u_buffers)}
        return super().state() | mine

    def begin(self) -> None:
        set_rate(self.u_optimizer, rate(self.u_rates, self.done, self.job.steps))
        super().begin()

    def step(self, batch: Any) -> dict[str, Tensor]:
        primary, auxiliary = batch
        self.begin()
        exact, scale = self.config.update == "exact", self.config.lambda_
        count = len(self.weights)
        wanted = self.weights if exact else [*self.weights, *self.alpha]
        loss_a, found = self.gradients(auxiliary, wanted, scale)
        self.step_weights(self._bound(found[:count], self.weights, self.u))
        of_alpha = found[count:]
        with self.primary():  # the model's parameters hold u, self.u holds w
            loss_p, found = self.gradients(primary, wanted)
            bound = self._bound(found[:count], self.weights, self.u)
        self.descend(self.u_optimizer, self.u, bound)
        if exact:
            _, of_alpha = self.score_gradients(auxiliary, scale)
            with self.primary():
                _, found[count:] = self.score_gradients(primary)
        penalty = self.step_scores([a + p for a, p in zip(of_alpha, found[count:], strict=True)])
        with torch.no_grad():
            apart = sum((u - w).square().sum() for u, w in zip(self.u, self.weights, strict=True))
        terms = {"primary": loss_p, "auxiliary": scale * loss_a, "penalty": penalty}
        terms["bond"] = self.config.beta / 2 * torch.as_tensor(apart)
        return {"loss": torch.stack(list(terms.values())).sum(), **terms}

    @contextmanager
    def primary(self) -> Iterator[None]:
        """The model with u and its own statistics in place of w."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        mine = [*self.weights, *self.buffers]
        for here, there in zip(mine, [*self.u, *self.u_buffers], strict=True):
            here.data, there.data = there.data, here.data

    @torch.no_grad()
    def _bound(self, gradients: list[Tensor], mine: list[nn.Parameter], other: list[nn.Parameter]) -> list[Tensor]:
        """With the gradient of the bond, beta (mine - other)."""
        apart = torch._foreach_sub(list(mine), list(other))
        return list(torch._foreach_add(gradients, apart, alpha=self.config.beta))
