"""Base of the searches that train scores: optimizers of weights and scores, losses, gradients and steps.

The scores are gates (netslim: or the scales of batch norms). With a number as `gamma` they have a penalty of that
strength (penalty.py), with `gamma: auto` a regularizer that follows from the budget (budget_regularizer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

from compress.graph import Group
from compress.surgery import attach_
from compress.training import lr_factor, make_optimizer, set_lr_

from ..base import Job, Search
from .budget_regularizer import BudgetRegularizer
from .penalty import Penalty
from .recompute import recompute_gated_weights
from .regularizer import ScorePositions, ScoreRegularizer
from .score_gradients import score_only_backward


class ScoredSearch(Search):
    """A search with a score for every dimension; weights and scores have separate optimizers."""

    def __init__(self, config: Any, job: Job) -> None:
        super().__init__(config, job)
        # Teacher outputs by id of the micro-batch. The micro-batch is kept so that its id is not reused.
        self._teacher_cache: dict[int, tuple[Any, Any]] = {}
        self.unused: list[bool] = []  # for each parameter of the last gradients: whether the loss did not use it
        self.score_positions = self.attach_scores()
        parameters = {id(a): a for positions in self.score_positions.values() for a, _ in positions}
        self.alpha: list[nn.Parameter] = list(parameters.values())
        self.weights = [p for p in job.model.parameters() if p.requires_grad and id(p) not in parameters]
        self.optimizer = make_optimizer(config, self.weights)
        self.score_training = config.alpha.merged_with(config)
        self.score_optimizer = make_optimizer(self.score_training, (), self.alpha)
        self.optimizers: Sequence[optim.Optimizer] = [self.optimizer, self.score_optimizer]
        self.regularizer = self.make_regularizer()

    def attach_scores(self) -> ScorePositions:
        """Attach the scores to the model; return their positions by group."""
        return attach_gates(self.job, [*self.job.groups])

    def make_regularizer(self) -> ScoreRegularizer:
        """Return the regularizer that draws the scores to zero."""
        if self.config.gamma == "auto":
            return BudgetRegularizer(self.gates(), self.job)
        return Penalty(self.config, self.alpha, self.score_positions, self.job)

    def gates(self) -> dict[str, nn.Parameter]:
        """Return the scores by group, where each group has one parameter."""
        return {name: positions[0][0] for name, positions in self.score_positions.items()}

    def importance(self) -> dict[str, Tensor]:
        return self.regularizer.importance()

    def scores(self) -> dict[str, Tensor]:
        """Return |score| of every dimension; the mean if a dimension has several."""
        return {
            name: torch.cat([a.detach().abs()[index] for a, index in positions], 1).mean(1)
            for name, positions in self.score_positions.items()
        }

    def state(self) -> dict[str, Tensor]:
        return self.regularizer.state()

    def loss_terms(self, batch: Any) -> dict[str, Tensor]:
        """Return the loss of the task, and that of distillation if the recipe has it."""
        task, distill = self.job.task, self.config.distill
        with recompute_gated_weights(self.job.model):
            outputs = task.forward(self.job.model, batch)
        terms = {"task": task.loss(outputs, batch)}
        if distill is not None:
            distance = task.distil(outputs, self._teacher_outputs(batch), distill.temperature)
            terms["distil"] = distill.weight * distance
        return terms

    def _teacher_outputs(self, batch: Any) -> Any:
        """Return the outputs of the dense model on a batch, computed once in a step."""
        if id(batch) not in self._teacher_cache:
            self._teacher_cache[id(batch)] = (batch, self.job.teacher_outputs(batch))
        return self._teacher_cache[id(batch)][1]

    def begin_step(self) -> None:
        """Set the learning rates of this step."""
        set_lr_(self.optimizer, lr_factor(self.config, self.done, self.job.steps))
        set_lr_(self.score_optimizer, lr_factor(self.score_training, self.done, self.job.steps))
        self.done += 1
        self._teacher_cache.clear()

    def gradients(self, batch: Any, parameters: Sequence[Tensor], factor: float = 1.0) -> tuple[Tensor, list[Tensor]]:
        """Return the loss on a batch, and `factor` times its gradient in the given parameters only."""
        counts = {"task": self.job.task.count_targets}
        result = self.job.gradient_computer.gradients(self.loss_terms, batch, parameters, factor, counts)
        self.unused = result.unused
        return result.loss, result.gradients

    def score_gradients(self, batch: Any, factor: float = 1.0) -> tuple[Tensor, list[Tensor]]:
        """Return the loss on a batch, and `factor` times its gradient in the scores; none of weights is computed."""
        with self._frozen_weights(), score_only_backward(self.job.model):
            return self.gradients(batch, self.alpha, factor)

    @contextmanager
    def _frozen_weights(self) -> Iterator[None]:
        for w in self.weights:
            w.requires_grad_(False)
        try:
            yield
        finally:
            for w in self.weights:
                w.requires_grad_(True)

    def step_jointly(self, batch: Any, before_step: Callable[[list[Tensor]], None] | None = None) -> dict[str, Tensor]:
        """Step weights and scores on the same gradients.

        Args:
            before_step: called with the gradients of the scores before any parameter changes.
        """
        parameters = [*self.weights, *self.alpha]
        loss, gradients = self.gradients(batch, parameters)
        score_gradients = gradients[len(self.weights) :]
        if before_step is not None:
            before_step(score_gradients)
        for p, g, unused in zip(parameters, gradients, self.unused, strict=True):
            p.grad = None if unused else g
        if self.config.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.config.clip)
        self.optimizer.step()
        penalty = self.step_scores(score_gradients)
        return {"loss": loss + penalty, "task": loss, "penalty": penalty}

    def step_weights(self, gradients: Sequence[Tensor]) -> None:
        """Step the weights on the last gradients."""
        self.step_optimizer(self.optimizer, self.weights, gradients)

    @torch.no_grad()
    def step_optimizer(
        self, optimizer: optim.Optimizer, weights: Sequence[nn.Parameter], gradients: Sequence[Tensor]
    ) -> None:
        """Step weights on the last gradients, clipped if the recipe says so.

        Weights that the last loss did not use are not changed, nor decayed.
        """
        for p, g, unused in zip(weights, gradients, self.unused, strict=False):
            p.grad = None if unused else g
        if self.config.clip is not None:
            torch.nn.utils.clip_grad_norm_(weights, self.config.clip)
        optimizer.step()

    def step_scores(self, gradients: Sequence[Tensor]) -> Tensor:
        """Step the scores on the gradients of the loss and on the regularizer; return its value."""
        return self.regularizer.step_(self.score_optimizer, gradients, self.done)


def attach_gates(job: Job, groups: Sequence[Group]) -> ScorePositions:
    """Attach a gate to each of the groups; return the positions of the scores."""
    gates = attach_(job.model, groups)
    return {name: [(a, torch.arange(len(a), device=a.device)[:, None])] for name, a in gates.items()}
