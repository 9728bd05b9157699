"""What all searches with trained scores share: the settings, and the optimisers of weights and scores.

The scores are gates (netslim: or the scales of batch norms). With a number as `gamma` they carry a penalty of that
strength (penalty.py); with `gamma: auto` a pull that follows from the budget (pull.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn, optim

from ..fields import NotNegative, Positive, Share, Strict, Teaching, Training, parse_number
from ..gates import attach_
from ..groups import Group, Groups
from ..lean import lean
from ..optimise import optimiser, rate, set_rate
from ..task import teaching
from . import Job, Ranking, Search, SearchConfig
from .anew import made_anew
from .penalty import Penalty, Places
from .pull import Pull


class Rates(Strict):
    """How a set of parameters of its own is trained; what is left out is as for the weights."""

    lr: Positive | None = None
    momentum: Annotated[Share, Field(lt=1)] | None = None
    weight_decay: NotNegative | None = None
    schedule: Literal["cosine", "step", "constant"] | None = None
    optimizer: Literal["sgd", "adamw"] | None = None

    def over(self, base: Training) -> Training:
        given = self.model_dump(exclude_none=True)
        return Training(**{name: getattr(base, name) for name in Training.model_fields} | given)


class ScoreRates(Rates):
    """How the scores are trained; what is left out is as for the weights, but for the decay."""

    weight_decay: NotNegative = 0.0


def _strength(value: Any) -> Any:
    number = parse_number(value)
    if value != "auto" and (number is None or not 0 <= number < math.inf):
        raise ValueError(f"expected auto, or a number that is not below zero, such as 1e-4; got {value!r}")
    return value if number is None else number


class ScoredConfig(SearchConfig, Training):
    """Settings of a search whose scores are trained."""

    ranking: Ranking = Field(
        "auto", description="across groups: auto is cost with gamma: auto, and global, as in the thesis, with a number"
    )
    gamma: Annotated[
        float | Literal["auto"], BeforeValidator(_strength, json_schema_input_type=float | Literal["auto"] | str)
    ] = Field(
        "auto", description="strength of the penalty on the scores; auto: a pull to zero that follows from the budget"
    )
    penalty: Literal["l1", "macs", "latency", "l1_split", "l0_split"] = Field("l1", description="what is penalised")
    proximal: bool = Field(False, description="l1, macs and latency by soft thresholding, which reaches zero exactly")
    split: Positive = Field(1.0, description="strength of the bond between scores and their sparse copy, if split")
    distill: Teaching | None = Field(None, description="learn from the dense model in the search, too")
    alpha: ScoreRates = Field(default_factory=lambda: ScoreRates(), description="training of the scores")

    @model_validator(mode="after")
    def _one_penalty(self) -> ScoredConfig:
        given = "penalty" if self.penalty != "l1" else "proximal" if self.proximal else None
        if self.gamma == "auto" and given:
            raise ValueError(f"{given}: expected a number as gamma along with it; gamma: auto is a penalty of its own")
        if self.proximal and self.penalty.endswith("split"):
            raise ValueError("proximal: a split penalty has thresholds of its own; leave proximal out, or choose l1")
        return self

    def ranks_by(self, groups: Groups, unit: str) -> Ranking:
        if self.ranking != "auto":
            return self.ranking
        return "cost" if self.gamma == "auto" else "global"

    @property
    def reaches_zero(self) -> bool:
        """Whether scores come to be exactly zero where they should."""
        given = self.gamma != "auto" and self.gamma > 0
        return given and (self.proximal or self.penalty.endswith("split"))

    @property
    def settles(self) -> bool:
        return self.gamma == "auto"


class Scored(Search):
    """A score for every dimension, weights and scores apart."""

    def __init__(self, config: Any, job: Job) -> None:
        super().__init__(config, job)
        self._answers: dict[int, tuple[Any, Any]] = {}  # with the piece, so that its number is nobody else's
        self.idle: list[bool] = []  # of what the last gradients were asked for: what the loss did not use
        self.places = self.attach()
        self.alpha: list[nn.Parameter] = list({id(a): a for here in self.places.values() for a, _ in here}.values())
        known = {id(a) for a in self.alpha}
        self.weights = [p for p in job.model.parameters() if p.requires_grad and id(p) not in known]
        self.optimizer = optimiser(config, self.weights)
        self.rates = config.alpha.over(config)
        self.score_optimizer = optimiser(self.rates, (), self.alpha)
        self.optimizers: Sequence[optim.Optimizer] = [self.optimizer, self.score_optimizer]
        self.penalty = self.penalise()

    def attach(self) -> Places:
        """Put the scores on; where they stand, by group."""
        return gates(self.job, [*self.job.groups])

    def penalise(self) -> Penalty | Pull:
        """What draws the scores to zero."""
        if self.config.gamma == "auto":
            return Pull({name: here[0][0] for name, here in self.places.items()}, self.job)
        return Penalty(self.config, self.alpha, self.places, self.job)

    def importance(self) -> dict[str, Tensor]:
        return self.penalty.importance()

    def scores(self) -> dict[str, Tensor]:
        """|score|; its mean where a dimension has several."""
        places = self.places.items()
        return {name: torch.cat([a.detach().abs()[i] for a, i in here], 1).mean(1) for name, here in places}

    def state(self) -> dict[str, Tensor]:
        return self.penalty.state()

    def loss(self, batch: Any) -> Tensor:
        """The task's loss, and what the dense model has to say about it."""
        task, distill = self.job.task, self.config.distill
        with made_anew(self.job.model):
            outputs = task.forward(self.job.model, batch)
        loss = task.loss(outputs, batch)
        if distill is not None:
            loss = loss + distill.weight * task.distil(outputs, self._taught(batch), distill.temperature)
        return loss

    @torch.no_grad()
    def _taught(self, batch: Any) -> Any:
        """What the dense model says of a batch, asked once in a step."""
        if self.job.teacher is None:
            raise ValueError("distill: there is no dense model to learn from; use compress.prune")
        if id(batch) not in self._answers:
            self._answers[id(batch)] = (batch, teaching(self.job.task)(self.job.teacher, batch))
        return self._answers[id(batch)][1]

    def begin(self) -> None:
        """Set the rates of this step."""
        set_rate(self.optimizer, rate(self.config, self.done, self.job.steps))
        set_rate(self.score_optimizer, rate(self.rates, self.done, self.job.steps))
        self.done += 1
        self._answers.clear()

    def gradients(self, batch: Any, wanted: Sequence[Tensor], scale: float = 1.0) -> tuple[Tensor, list[Tensor]]:
        """The loss on a batch, and scale times its gradient with respect to these and to nothing else."""
        found = self.job.compute.gradients(lambda piece: {"task": self.loss(piece)}, batch, wanted, scale)
        self.idle = found.idle
        return found.loss, found.gradients

    def score_gradients(self, batch: Any, scale: float = 1.0) -> tuple[Tensor, list[Tensor]]:
        """The same with respect to the scores; none of weights is computed."""
        with self._frozen(), lean(self.job.model):
            return self.gradients(batch, self.alpha, scale)

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        for w in self.weights:
            w.requires_grad_(False)
        try:
            yield
        finally:
            for w in self.weights:
                w.requires_grad_(True)

    def step_together(self, batch: Any, between: Callable[[list[Tensor]], None] | None = None) -> dict[str, Tensor]:
        """Weights and scores on the same gradients; `between` sees those of the scores before anything moves."""
        both = [*self.weights, *self.alpha]
        loss, found = self.gradients(batch, both)
        of_alpha = found[len(self.weights) :]
        if between is not None:
            between(of_alpha)
        for p, g, idle in zip(both, found, self.idle, strict=True):
            p.grad = None if idle else g
        if self.config.clip is not None:
            torch.nn.utils.clip_grad_norm_(both, self.config.clip)
        self.optimizer.step()
        penalty = self.step_scores(of_alpha)
        return {"loss": loss + penalty, "task": loss, "penalty": penalty}

    def step_weights(self, gradients: Sequence[Tensor]) -> None:
        self.descend(self.optimizer, self.weights, gradients)

    @torch.no_grad()
    def descend(self, optimizer: optim.Optimizer, weights: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """One step of these weights along these gradients, clipped if the recipe says so.

        What the last loss did not use is left alone, and not decayed.
        """
        for p, g, idle in zip(weights, gradients, self.idle, strict=False):
            p.grad = None if idle else g
        if self.config.clip is not None:
            torch.nn.utils.clip_grad_norm_(weights, self.config.clip)
        optimizer.step()

    def step_scores(self, gradients: Sequence[Tensor]) -> Tensor:
        """One step on the loss's gradients and the penalty; returns the penalty."""
        return self.penalty.step_(self.score_optimizer, gradients, self.done)


def gates(job: Job, groups: Sequence[Group]) -> Places:
    """A gate on each of these groups."""
    made = attach_(job.model, groups)
    return {name: [(a, torch.arange(len(a), device=a.device)[:, None])] for name, a in made.items()}
