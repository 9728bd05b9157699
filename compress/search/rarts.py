"""RARTS: relaxed architecture search, with two sets of weights that share the scores.

F. Xue, Relaxation and Optimization for Automated Learning of Neural Network Architectures, 2022, chapter 2. With the
data in halves D_p and D_a, primary weights u and auxiliary weights w, the regularized Lagrangian (2.11) is

    L(u, w, alpha) = L_p(u, alpha) + lambda L_a(w, alpha) + beta / 2 ||u - w||^2 + gamma P(alpha)

and each iteration (2.12), (2.34) makes three steps, each with the result of the step before (Gauss-Seidel):

    w     <- w     - eta_w     (lambda grad_w L_a(w, alpha) + beta (w - u))
    u     <- u     - eta_u     (grad_u L_p(u, alpha) + beta (u - w))
    alpha <- alpha - eta_alpha (lambda grad_alpha L_a(w, alpha) + grad_alpha L_p(u, alpha) + gamma grad P(alpha))

The weights kept are w (algorithm 3). `update: fused` takes the gradient of alpha from the backward passes of the first
two steps, at the old w and u. That halves the passes, but is no longer the Gauss-Seidel iteration of theorem 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.modules import fresh_tensors
from compress.recipe import NonNegative, Positive
from compress.training import lr_factor, make_optimizer, set_lr_

from .base import Job, register_search
from .score_training import OptimizerOverrides, ScoredConfig, ScoredSearch


class RartsConfig(ScoredConfig):
    """Two sets of weights on two halves of the data, one set of scores (Xue 2022)."""

    method: Literal["rarts"] = "rarts"
    lambda_: Positive = Field(1.0, alias="lambda", description="weight of the auxiliary loss")
    beta: NonNegative = Field(1e-2, description="strength of the coupling between the two sets of weights")
    u: OptimizerOverrides = Field(
        default_factory=lambda: OptimizerOverrides(), description="training of the primary weights"
    )
    start: Literal["equal", "apart", "independent"] = Field(
        "equal",
        description="initial u. equal: w; apart: w plus noise of 1 % of its standard deviation; independent: new "
        "random weights, as the layers draw them",
    )
    update: Literal["exact", "fused"] = Field(
        "exact", description="exact: Gauss-Seidel steps; fused: half of the passes, at the old weights"
    )


@register_search("rarts")
class Rarts(ScoredSearch):
    """Two sets of weights, each trained on its half of the data, with shared scores."""

    Config = RartsConfig
    batches_per_step = 2

    def __init__(self, config: RartsConfig, job: Job) -> None:
        drawn = fresh_tensors(job.model) if config.start == "independent" else {}  # before gates replace the weights
        super().__init__(config, job)
        self.u = [nn.Parameter(drawn.get(id(w), w.detach()).clone()) for w in self.weights]
        self.buffers = list(job.model.buffers())
        self.u_buffers = [drawn.get(id(b), b).clone() for b in self.buffers]
        if config.start == "apart":
            with torch.no_grad():
                for u in self.u:
                    u.add_(0.01 * u.std(unbiased=False) * torch.randn_like(u))
        self.u_training = config.u.merged_with(config)
        self.u_optimizer = make_optimizer(self.u_training, self.u)
        self.optimizers = [*self.optimizers, self.u_optimizer]

    def state(self) -> dict[str, Tensor]:
        own = {f"u{i}": u for i, u in enumerate(self.u)} | {f"buffer{i}": b for i, b in enumerate(self.u_buffers)}
        return super().state() | own

    def begin_step(self) -> None:
        set_lr_(self.u_optimizer, lr_factor(self.u_training, self.done, self.job.steps))
        super().begin_step()

    def step(self, batch: Any) -> dict[str, Tensor]:
        primary, auxiliary = batch
        self.begin_step()
        exact, lambda_ = self.config.update == "exact", self.config.lambda_
        count = len(self.weights)
        parameters = self.weights if exact else [*self.weights, *self.alpha]
        # The costs are recorded where the scores are differentiated.
        halves = (None, None) if exact else ("auxiliary", "primary")
        loss_a, auxiliary_gradients = self.gradients(auxiliary, parameters, lambda_, halves[0])
        self.step_weights(self._with_coupling(auxiliary_gradients[:count]))
        auxiliary_score_gradients = auxiliary_gradients[count:]
        with self.primary_weights():  # the model's parameters hold u, self.u holds w
            loss_p, primary_gradients = self.gradients(primary, parameters, half=halves[1])
            coupled = self._with_coupling(primary_gradients[:count])
        primary_score_gradients = primary_gradients[count:]
        self.step_optimizer(self.u_optimizer, self.u, coupled)
        if exact:
            _, auxiliary_score_gradients = self.score_gradients(auxiliary, lambda_, "auxiliary")
            with self.primary_weights():
                _, primary_score_gradients = self.score_gradients(primary, half="primary")
        penalty = self.step_scores(
            [a + p for a, p in zip(auxiliary_score_gradients, primary_score_gradients, strict=True)]
        )
        with torch.no_grad():
            distance = sum((u - w).square().sum() for u, w in zip(self.u, self.weights, strict=True))
        terms = {"primary": loss_p, "auxiliary": lambda_ * loss_a, "penalty": penalty}
        terms["coupling"] = self.config.beta / 2 * torch.as_tensor(distance)
        return {"loss": torch.stack(list(terms.values())).sum(), **terms}

    @contextmanager
    def primary_weights(self) -> Iterator[None]:
        """Let the model hold u and its batch norm statistics instead of w."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        auxiliary, primary = [*self.weights, *self.buffers], [*self.u, *self.u_buffers]
        for w, u in zip(auxiliary, primary, strict=True):
            w.data, u.data = u.data, w.data

    @torch.no_grad()
    def _with_coupling(self, gradients: list[Tensor]) -> list[Tensor]:
        """Add the gradient of the coupling, beta times the model's weights minus the other set."""
        difference = torch._foreach_sub(list(self.weights), list(self.u))
        return list(torch._foreach_add(gradients, difference, alpha=self.config.beta))
