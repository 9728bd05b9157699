"""Base of the searches that train scores: optimizers of weights and scores, losses, gradients and steps.

The scores are gates (netslim: or the scales of batch norms). With a number as `gamma` they have a penalty of that
strength (penalty.py), with `gamma: auto` a regularizer that follows from the budget (budget_regularizer.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from compress.graph import Group
from compress.recipe import TrainingConfig
from compress.surgery import attach_
from compress.training import lr_factor, make_optimizer, set_lr_

from ..base import Job, Search
from ..cost_history import CostSample
from .budget_regularizer import BudgetRegularizer
from .expected_cost import ExpectedCost
from .penalty import Penalty
from .recompute import recompute_gated_weights
from .regularizer import ScorePositions, ScoreRegularizer
from .score_costs import SAMPLES, ScoreCosts, sum_samples
from .score_gradients import score_only_backward


class ScoredSearch(Search):
    """A search with a score for every dimension; weights and scores have separate optimizers."""

    def __init__(self, config: Any, job: Job) -> None:
        super().__init__(config, job)
        # Teacher outputs by id of the micro-batch. The micro-batch is kept so that its id is not reused.
        self._teacher_cache: dict[int, tuple[Any, Any]] = {}
        self.unused: list[bool] = []  # for each parameter of the last gradients: whether the loss did not use it
        on_operations = job.operations is not None
        self.score_positions = self.attach_operation_scores() if on_operations else self.attach_scores()
        parameters = {id(a): a for positions in self.score_positions.values() for a, _ in positions}
        self.alpha: list[nn.Parameter] = list(parameters.values())
        self.score_costs: ScoreCosts | None = None
        if config.costs and self.score_positions:
            halves = ("auxiliary", "primary") if self.batches_per_step == 2 else ("all",)
            self.score_costs = ScoreCosts(self.score_positions, job.operations, halves)
        no_weights = {*parameters, *map(id, self.score_costs.tensors if self.score_costs is not None else ())}
        self.weights = [p for p in job.model.parameters() if p.requires_grad and id(p) not in no_weights]
        self.optimizer = make_optimizer(config, self.weights)
        self.score_training = self.operation_score_training() if on_operations else config.alpha.merged_with(config)
        self.score_optimizer = make_optimizer(self.score_training, (), self.alpha)
        self.optimizers: Sequence[optim.Optimizer] = [self.optimizer, self.score_optimizer]
        self.regularizer = self.make_operation_regularizer() if on_operations else self.make_regularizer()

    def attach_scores(self) -> ScorePositions:
        """Attach the scores to the model; return their positions by group."""
        return attach_gates(self.job, [*self.job.groups])

    def make_regularizer(self) -> ScoreRegularizer:
        """Return the regularizer that draws the scores to zero."""
        if self.config.gamma == "auto":
            return BudgetRegularizer(self.gates(), self.job)
        return Penalty(self.config, self.alpha, self.score_positions, self.job)

    def attach_operation_scores(self) -> ScorePositions:
        """Return the positions of the scores of each group of choices; the model has them already."""
        assert self.job.operations is not None
        positions: ScorePositions = {}
        for name, a in self.job.operations.scores.items():
            a.requires_grad_(True)
            positions[name] = [(a, torch.arange(len(a), device=a.device)[:, None])]
        return positions

    def operation_score_training(self) -> TrainingConfig:
        """Return the training settings of the scores of operations."""
        training: TrainingConfig = self.config.alpha.for_operations(self.config)
        return training

    def make_operation_regularizer(self) -> ScoreRegularizer:
        """Return the regularizer of the scores of operations."""
        assert self.job.operations is not None
        return ExpectedCost(self.config, self.job.operations.scores, self.job.operations)

    def gates(self) -> dict[str, nn.Parameter]:
        """Return the scores by group, where each group has one parameter."""
        return {name: positions[0][0] for name, positions in self.score_positions.items()}

    def importance(self) -> dict[str, Tensor]:
        return self.regularizer.importance()

    def scores(self) -> dict[str, Tensor]:
        """Return |score| of every dimension, the mean if a dimension has several; the weight of every operation."""
        if self.job.operations is not None:
            return self.importance()
        return {
            name: torch.cat([a.detach().abs()[index] for a, index in positions], 1).mean(1)
            for name, positions in self.score_positions.items()
        }

    def read_costs_(self) -> dict[str, CostSample]:
        return {} if self.score_costs is None else self.score_costs.read_()

    def state(self) -> dict[str, Tensor]:
        return self.regularizer.state() | ({} if self.score_costs is None else self.score_costs.state())

    def loss_terms(self, batch: Any, with_samples: bool = False) -> dict[str, Tensor]:
        """Return the loss of the task, and that of distillation if the recipe has it.

        Args:
            with_samples: also return the sums of `sum_samples`, which are no part of the loss.
        """
        task, distill = self.job.task, self.config.distill
        with recompute_gated_weights(self.job.model):
            outputs = task.forward(self.job.model, batch)
        terms = {"task": task.loss(outputs, batch)}
        if distill is not None:
            distance = task.distil(outputs, self._teacher_outputs(batch), distill.temperature)
            terms["distil"] = distill.weight * distance
        if with_samples and (samples := sum_samples(task, outputs, batch)) is not None:
            terms[SAMPLES] = samples
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

    def gradients(
        self, batch: Any, parameters: Sequence[Tensor], factor: float = 1.0, half: str | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss on a batch, and `factor` times its gradient in the given parameters only.

        Args:
            half: of the data, to record the costs of the scores on it if the recipe says so; None: do not.
        """
        costs = self.score_costs if half is not None else None
        tensors = [*parameters, *(costs.missing_from(parameters) if costs is not None else ())]
        loss_terms = partial(self.loss_terms, with_samples=costs is not None)
        counts = {"task": self.job.task.count_targets}
        result = self.job.gradient_computer.gradients(loss_terms, batch, tensors, factor, counts, measured=(SAMPLES,))
        if costs is not None and half is not None:
            gradient_of = dict(zip(map(id, tensors), result.gradients, strict=True))
            samples = result.measured.get(SAMPLES)
            costs.add_(half, [gradient_of[id(t)] for t in costs.tensors], factor, samples)
        self.unused = result.unused[: len(parameters)]
        return result.loss, result.gradients[: len(parameters)]

    def score_gradients(self, batch: Any, factor: float = 1.0, half: str | None = None) -> tuple[Tensor, list[Tensor]]:
        """Return the loss on a batch, and `factor` times its gradient in the scores; none of weights is computed."""
        with self._frozen_weights(), score_only_backward(self.job.model):
            return self.gradients(batch, self.alpha, factor, half)

    @contextmanager
    def _frozen_weights(self) -> Iterator[None]:
        for w in self.weights:
            w.requires_grad_(False)
        try:
            yield
        finally:
            for w in self.weights:
                w.requires_grad_(True)

    def step_jointly(self, batch: Any) -> dict[str, Tensor]:
        """Step weights and scores on the same gradients."""
        parameters = [*self.weights, *self.alpha]
        loss, gradients = self.gradients(batch, parameters, half="all")
        score_gradients = gradients[len(self.weights) :]
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
