"""What all searches with trained gates share: scores, their penalty, and the optimisers of weights and scores.

The penalty gamma * P(alpha) is one of

    l1        sum |alpha_i|
    macs      sum c_i |alpha_i|, c_i the multiply-adds of dimension i, 1 on average
    l1_split  by relaxed variable splitting (Xue 2022, 2.1.2): alpha is drawn to v by split / 2 ||alpha - v||^2, and
    l0_split  v = S(alpha, gamma / split) or H(alpha, gamma / split), which is zero where it should be

`gamma: auto` puts a pull that knows the budget in its place. A running mean of (alpha_i dL/dalpha_i)^2 says what
dimension i is worth; per unit of the budget's cost it says which dimensions lie below the budget's line. The line moves
from the dense network to the budget over the first part of the search, and what lies below it is drawn to zero:

    alpha_i <- sign(alpha_i) max(|alpha_i| - pull, 0),  pull = 1 / (PULL * steps)

When the line has come to the budget it stays, and a bound on what lies below it goes down to zero as well: what will be
cut is at zero some time before the search ends, and the weights learn to do without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn, optim

from ..fields import NotNegative, Positive, Share, Strict, Training
from ..gates import attach_
from ..optimise import optimiser, rate, set_rate
from . import Job, Ranking, Search, SearchConfig

MEMORY = 0.95  # of the running mean of what a dimension is worth
MOVING = 0.6  # part of the search over which the budget's line moves
PULL = 0.2  # part of the search that a score takes from one to zero
LOOKS = 100  # times that the line is drawn anew


class Rates(Strict):
    """How a set of parameters of its own is trained; what is left out is as for the weights."""

    lr: Positive | None = None
    momentum: Share | None = None
    weight_decay: NotNegative | None = None
    schedule: Literal["cosine", "step", "constant"] | None = None
    optimizer: Literal["sgd", "adamw"] | None = None

    def over(self, base: Training) -> Training:
        given = self.model_dump(exclude_none=True)
        return Training(**{name: getattr(base, name) for name in Training.model_fields} | given)


class ScoredConfig(SearchConfig, Training):
    """Settings of a search whose scores are gates."""

    ranking: Ranking = Field(
        "auto", description="across groups: auto is cost with gamma: auto, and global, as in the thesis, with a number"
    )
    gamma: NotNegative | Literal["auto"] = Field(
        "auto", description="strength of the penalty on the scores; auto: a pull to zero that follows from the budget"
    )
    penalty: Literal["l1", "macs", "l1_split", "l0_split"] = Field("l1", description="what is penalised")
    split: Positive = Field(1.0, description="strength of the bond between scores and their sparse copy, if split")
    alpha: Rates = Field(default_factory=lambda: Rates(weight_decay=0.0), description="training of the scores")

    @model_validator(mode="after")
    def _one_penalty(self) -> ScoredConfig:
        if self.gamma == "auto" and self.penalty != "l1":
            raise ValueError("penalty: expected a number as gamma along with it; gamma: auto is a penalty of its own")
        return self

    @property
    def ranks_by(self) -> Ranking:
        if self.ranking != "auto":
            return self.ranking
        return "cost" if self.gamma == "auto" else "global"


def soft_threshold(value: Tensor, t: float) -> Tensor:
    """argmin_v t |v| + (v - value)^2 / 2."""
    return value.sign() * (value.abs() - t).clamp_min(0)


def hard_threshold(value: Tensor, t: float) -> Tensor:
    """argmin_v t [v != 0] + (v - value)^2 / 2."""
    return torch.where(value.abs() <= (2 * t) ** 0.5, torch.zeros_like(value), value)


class Scored(Search):
    """Gates on every group, weights and scores apart."""

    def __init__(self, config: Any, job: Job) -> None:
        super().__init__(config, job)
        self.scores = self.attach()
        self.alpha: list[nn.Parameter] = list(self.scores.values())
        known = {id(a) for a in self.alpha}
        self.weights = [p for p in job.model.parameters() if p.requires_grad and id(p) not in known]
        self.optimizer = optimiser(config, self.weights)
        self.rates = config.alpha.over(config)
        self.score_optimizer = optimiser(self.rates, (), self.alpha)
        self.optimizers: Sequence[optim.Optimizer] = [self.optimizer, self.score_optimizer]
        self.prices = self._prices()
        self.sparse = [a.detach().clone() for a in self.alpha] if "split" in config.penalty else []
        self.worth = [torch.zeros_like(a) for a in self.alpha] if config.gamma == "auto" else []
        self.below = [torch.zeros_like(a) for a in self.worth]  # 1 where a score is drawn to zero

    def attach(self) -> dict[str, nn.Parameter]:
        """The scores by group."""
        return attach_(self.job.model, self.job.groups)

    def importance(self) -> dict[str, Tensor]:
        """|score|; where it was split, of the sparse copy first. What a dimension is worth where the budget pulls."""
        if self.worth:
            return {n: w * (a.detach() != 0) for (n, a), w in zip(self.scores.items(), self.worth, strict=True)}
        if not self.sparse:
            return {name: a.detach().abs() for name, a in self.scores.items()}
        return {n: a.detach().abs() * (v != 0) for (n, a), v in zip(self.scores.items(), self.sparse, strict=True)}

    def state(self) -> dict[str, Tensor]:
        lists = {"sparse": self.sparse, "worth": self.worth, "below": self.below}
        return {f"{name}{i}": v for name, values in lists.items() for i, v in enumerate(values)}

    def loss(self, batch: Any) -> Tensor:
        return self.job.task.loss(self.job.task.forward(self.job.model, batch), batch)

    def begin(self) -> None:
        """Set the rates of this step."""
        set_rate(self.optimizer, rate(self.config, self.done, self.job.steps))
        set_rate(self.score_optimizer, rate(self.rates, self.done, self.job.steps))
        self.done += 1

    def gradients(self, loss: Tensor, wanted: Sequence[Tensor]) -> list[Tensor]:
        """Of these and of nothing else."""
        found = torch.autograd.grad(loss, list(wanted), allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(wanted, found, strict=True)]

    def step_weights(self, gradients: Sequence[Tensor]) -> None:
        self.descend(self.optimizer, self.weights, gradients)

    @torch.no_grad()
    def descend(self, optimizer: optim.Optimizer, weights: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """One step of these weights along these gradients, clipped if the recipe says so."""
        for p, g in zip(weights, gradients, strict=True):
            p.grad = g
        if self.config.clip is not None:
            torch.nn.utils.clip_grad_norm_(weights, self.config.clip)
        optimizer.step()

    @torch.no_grad()
    def step_scores(self, gradients: Sequence[Tensor]) -> Tensor:
        """One step on the loss's gradients and the penalty's; returns the penalty."""
        if self.worth:
            return self._pull(gradients)
        gamma, split = self.config.gamma, self.config.split
        for i, (a, g) in enumerate(zip(self.alpha, gradients, strict=True)):
            a.grad = g + (split * (a - self.sparse[i]) if self.sparse else gamma * self.prices[i] * a.sign())
        self.score_optimizer.step()
        if self.sparse:
            threshold = soft_threshold if self.config.penalty == "l1_split" else hard_threshold
            for v, a in zip(self.sparse, self.alpha, strict=True):
                v.copy_(threshold(a, gamma / split))
        return self.penalty()

    def _pull(self, gradients: Sequence[Tensor]) -> Tensor:
        """One step on the gradients; what lies below the budget's line goes a little nearer to zero, and stays."""
        steps, line = self.job.steps, self.job.line
        if line is None:
            raise ValueError("gamma: auto follows from the budget, and there is none; give gamma a number")
        gone = [(low > 0) & (a == 0) for a, low in zip(self.alpha, self.below, strict=True)]
        for a, g, w in zip(self.alpha, gradients, self.worth, strict=True):
            w.mul_(MEMORY).add_((a * g).square(), alpha=1 - MEMORY)
            a.grad = g
        self.score_optimizer.step()
        for a, dead in zip(self.alpha, gone, strict=True):
            a.masked_fill_(dead, 0)
        part = self.done / (MOVING * steps)
        if part <= 1 and (self.done % max(1, steps // LOOKS) == 0 or part > 1 - 1 / (MOVING * steps)):
            keep = line(self.importance(), part)
            for name, low in zip(self.scores, self.below, strict=True):
                low.fill_(1)
                low[torch.as_tensor(keep[name], device=low.device)] = 0
        pull, most = 1 / (PULL * steps), max(0.0, 1 - (self.done - MOVING * steps) / (PULL * steps))
        for a, low in zip(self.alpha, self.below, strict=True):
            a.copy_(torch.where(low > 0, soft_threshold(a, pull).clamp(-most, most), a))
        return torch.stack([(low * a.abs()).sum() for a, low in zip(self.alpha, self.below, strict=True)]).sum()

    @torch.no_grad()
    def penalty(self) -> Tensor:
        if self.config.penalty == "l0_split":
            parts = [(v != 0).sum().to(v.dtype) for v in self.sparse]
        else:
            values: Sequence[Tensor] = self.sparse or self.alpha
            parts = [(price * v.abs()).sum() for price, v in zip(self.prices, values, strict=True)]
        gamma: float = self.config.gamma
        return gamma * torch.stack(parts).sum()

    def _prices(self) -> list[Tensor]:
        """What each score's penalty is multiplied with."""
        if self.config.penalty != "macs":
            return [torch.ones((), dtype=a.dtype, device=a.device) for a in self.alpha]
        cost = self.job.groups.cost
        one_less = cost.widths - np.eye(len(cost.widths), dtype=np.int64)
        each = (cost.macs(cost.widths) - cost.macs(one_less)).astype(float)
        each *= cost.widths.sum() / max(1.0, float((each * cost.widths).sum()))
        found = dict(zip(cost.names, each.tolist(), strict=True))
        return [torch.tensor(found[n], dtype=a.dtype, device=a.device) for n, a in self.scores.items()]
