"""BayesNAS: scores have priors whose variance the data choose, and go where the prior's entropy is not above zero.

Zhou, Yang, Wang, Pan, BayesNAS: a Bayesian approach for neural architecture search, ICML 2019, algorithm 1, with the
score of a dimension in place of that of an edge. Weights and scores are trained together (16),

    min over W, w of  L(W, w) + gamma * sum omega_i |w_i|

where `gamma` is the paper's sparsity intensity lambda_w, proximal steps reach zero, and weight decay is the recipe's.
At the end of each outer iteration, one an epoch, the curvature of the scores is taken on a few samples (curvature.py)
and the variances of the priors, which are the importance, are found anew (evidence.py). With `budget: auto` a dimension
with ln(2 pi e variance) / 2 <= 0 goes there and then, half of a group in an iteration unless all is worth nothing; with
a budget, the budget decides by the variances.

With `gamma: auto` there is no l1 but the pull of the other searches (pull.py), on what has the least evidence: the line
is drawn by w'^2 H per cost, of which the variance is a rising function, and the curvature is a running mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..curvature import Curvature, Kind, count_of, told
from ..groups import Groups
from ..loading import derived
from ..processes import mean_, world
from . import Job, Ranking, register_search
from .evidence import Evidence, predecessors
from .penalty import Penalty, Places, prices
from .pull import LOOKS, Pull
from .scored import Scored, ScoredConfig

CLOSING = 0.25  # part of an outer iteration at whose end samples are taken
LEAST = 1e-12  # that a dimension is to be worth
LEAST_SAMPLES = 128
SURELY = 0.01  # of lambda: a dimension that is worth less goes with however many others
SHARE = 0.05  # of the samples of an outer iteration, on which the curvature is taken
MEMORY = 0.8  # of the running mean of the curvature, from look to look


class BayesnasConfig(ScoredConfig):
    """Priors on the scores, their variances by evidence (Zhou et al. 2019)."""

    method: Literal["bayesnas"] = "bayesnas"
    ranking: Ranking = Field("auto", description="across groups: auto is cost, and global with penalty: macs")
    hessian: Kind = Field(
        "auto",
        description="of the scores: gauss_newton, where the task can draw targets (auto), else empirical (Fisher); "
        "paper is the paper's estimate (C.3.2)",
    )
    samples: int | None = Field(
        None, ge=1, description="that the curvature is taken on in an outer iteration; 5 % and at least 128 if left out"
    )
    iterations: int | None = Field(None, ge=1, description="outer iterations; one for each epoch if left out")

    @model_validator(mode="after")
    def _no_split(self) -> BayesnasConfig:
        if self.penalty.endswith("split"):
            raise ValueError(
                "penalty: bayesnas weighs each score anew and steps by soft thresholding; choose l1 or macs"
            )
        return self

    def ranks_by(self, groups: Groups, unit: str) -> Ranking:
        if self.ranking != "auto":
            return self.ranking
        return "global" if self.penalty == "macs" else "cost"

    @property
    def reaches_zero(self) -> bool:
        return self.gamma != "auto" and self.gamma > 0


class Evident(Pull):
    """The pull on what has the least evidence."""

    evidence: Evidence

    def weigh_(self, gradients: Sequence[Tensor]) -> None:
        for worth, found in zip(self.worth, self.evidence.worth.values(), strict=True):
            worth.copy_(found)


@register_search("bayesnas")
class Bayesnas(Scored):
    """Re-weighted l1 on the scores, the weights by evidence."""

    Config = BayesnasConfig

    def __init__(self, config: BayesnasConfig, job: Job) -> None:
        super().__init__(config, job)
        scores = {name: here[0][0] for name, here in self.places.items()}
        self.evidence = Evidence(scores, self.before)
        self.curvature = Curvature(job.model, job.groups, scores, config.hessian)
        if isinstance(self.penalty, Evident):
            self.penalty.evidence = self.evidence
        self.prices = self._prices()
        blank = [{name: torch.zeros_like(a, requires_grad=False) for name, a in scores.items()} for _ in range(3)]
        self.slopes, self.means, self.dead = blank  # sums of gradients and of scores; 1 where a dimension is gone
        self.seen, self.images = (self.curvature.count.clone() for _ in range(2))  # steps and samples they are over
        self.start = self.seen.clone()  # what half of the dimensions were worth before the search
        self.rounds = config.iterations or (max(1, round(job.steps / job.epoch)) if job.epoch else 1)
        self.period = math.ceil(job.steps / self.rounds)
        self.closing = max(1, round(CLOSING * self.period))
        if config.gamma == "auto":  # as often as the line is drawn
            self.closing = self.period = max(1, job.steps // LOOKS)
        self.looks = max(1, job.steps // self.period) * self.closing / self.rounds  # steps of an iteration with samples

    def _prices(self) -> dict[str, Tensor]:
        """What the penalty of each dimension is multiplied with, before the evidence is."""
        names = self.evidence.scores
        if isinstance(self.penalty, Penalty):
            return {n: p.clone() for n, p in zip(names, self.penalty.prices, strict=True)}
        each = prices("macs", self.job, [*names])
        return {n: torch.full_like(a, each[n], requires_grad=False) for n, a in names.items()}

    def attach(self) -> Places:
        self.before = predecessors(self.job.model, self.job.groups)
        return super().attach()

    def penalise(self) -> Penalty | Pull:
        if self.config.gamma == "auto":
            return Evident({name: here[0][0] for name, here in self.places.items()}, self.job)
        steps_that_reach_zero = self.config.model_copy(update={"proximal": True})
        return Penalty(steps_that_reach_zero, self.alpha, self.places, self.job)

    def step(self, batch: Any) -> dict[str, Tensor]:
        self.begin()
        terms = self.step_together(batch, lambda slopes: self._look(batch, slopes))
        with torch.no_grad():
            for name, a in self.evidence.scores.items():
                a.masked_fill_(self.dead[name] > 0, 0)
        return terms

    def importance(self) -> dict[str, Tensor]:
        """The variance of each score's prior; zero where the score was drawn to zero, or is to go."""
        drawn, least = self.config.gamma == "auto", torch.finfo(torch.float32).tiny
        gone = {n: a.detach() == 0 if drawn else self.dead[n] > 0 for n, a in self.evidence.scores.items()}
        known = self.evidence
        order = {
            n: gamma + least * (1 + v / (1 + v))
            for (n, gamma), v in zip(known.gamma.items(), known.worth.values(), strict=True)
        }
        return {n: torch.where(gone[n], 0.0, order[n]) for n in order}

    def switches(self) -> dict[str, float]:
        """The variance of the prior of each group's switch: zero where the whole group may go."""
        return dict(zip(self.evidence.scores, self.evidence.switch.tolist(), strict=True))

    def notes(self) -> list[str]:
        kind = "Gauss-Newton, by random signs" if self.curvature.draws(self.job.task) else "empirical Fisher"
        if self.config.hessian == "paper":
            kind = f"the paper's estimate for {len(self.curvature.layers)} of {len(self.places)} groups, else {kind}"
        return [f"curvature of the scores: {kind}", *told(self.evidence.clamped, "scores")]

    def state(self) -> dict[str, Tensor]:
        tables = {"slope": self.slopes, "mean": self.means, "dead": self.dead, "price": self.prices}
        mine = {f"{key}{i}": v for key, table in tables.items() for i, v in enumerate(table.values())}
        weighed = {f"weighed{i}": price for i, price in enumerate(getattr(self.penalty, "prices", []))}
        return (
            super().state()
            | self.evidence.state()
            | self.curvature.state()
            | mine
            | weighed
            | {"seen": self.seen, "images": self.images, "start": self.start}
        )

    @torch.no_grad()
    def _look(self, batch: Any, slopes: Sequence[Tensor]) -> None:
        """Take samples where it is time, and end the outer iteration where it ends."""
        if self.done == 1 and self.job.line is None:
            self._sample(batch, LEAST_SAMPLES)
            each = zip(self.curvature.mean()[0].values(), self.prices.values(), strict=True)
            self.start.copy_(torch.cat([h / p for h, p in each]).median())
            self.curvature.clear_()
        inside = (self.done - 1) % self.period + 1
        last = self.done == self.job.steps
        if inside > self.period - self.closing or last:
            for (name, a), g in zip(self.evidence.scores.items(), slopes, strict=True):
                self.slopes[name].add_(g)
                self.means[name].add_(a)
            self.seen.add_(1)
            size = count_of(batch) * world()
            self.images.add_(size)
            self._sample(batch, max(LEAST_SAMPLES, SHARE * size * self.job.steps / self.rounds) / self.looks)
        if inside == self.period or last:
            self._update()

    def _sample(self, batch: Any, count: float) -> None:
        """Take the curvature on so many samples, or on as many as the recipe says."""
        wanted = math.ceil((count if self.config.samples is None else self.config.samples / self.looks) / world())
        with torch.enable_grad(), self.job.compute.autocast():
            seed = derived(self.job.seed, "curvature", self.done)
            self.curvature.add_(self.job.task, batch, wanted, self.config.distill, self._taught, seed)

    def _update(self) -> None:
        """End an outer iteration: (17)-(20), and what goes by entropy goes."""
        sums = [*self.slopes.values(), *self.means.values(), self.seen, self.images, *self.curvature.tensors()]
        mean_(sums)  # sums and their counts keep their ratio
        h, switches = self.curvature.mean()
        g, w = ({n: v / self.seen for n, v in table.items()} for table in (self.slopes, self.means))
        part = 0.0 if self.config.gamma == "auto" else float(self.seen) / self.period  # of the data of an iteration
        noise = max(0.0, 1 - part) / float(self.images)
        self.evidence.weigh_(w, g, h, noise)
        units = self._units()
        self.evidence.update_(w, g, switches, units, noise)
        for tensor in sums:
            tensor.mul_(MEMORY if self.config.gamma == "auto" else 0)
        if isinstance(self.penalty, Penalty):
            of_each = zip(self.penalty.prices, self.prices.values(), self.evidence.omega.values(), strict=True)
            for price, base, omega in of_each:
                price.copy_(base * omega)
            if self.job.line is None:
                self._prune(units)

    def _units(self) -> dict[str, Tensor]:
        """lambda of each group: gamma times its price; with `gamma: auto`, what is above the line is just worth it."""
        if isinstance(self.penalty, Penalty):
            strength = torch.tensor(self.config.gamma)
        else:
            each = zip(self.evidence.worth.values(), self.prices.values(), self.penalty.below, strict=True)
            strength = torch.cat([torch.where(low > 0, torch.inf, v / p) for v, p, low in each]).min()
        return {name: (strength.to(p) * p[0]).clamp_min(LEAST) for name, p in self.prices.items()}

    def _prune(self, units: Mapping[str, Tensor]) -> None:
        """What has no entropy goes, but the better half of a group stays for another iteration.

        Evidence takes dimensions one by one, and of several that do the same thing each looks useless. A group whose
        switch is off goes at once, and so does what is worth next to nothing (SURELY of what it should be).

        Raises:
            ValueError: nothing would be left.
        """
        for i, (name, dead) in enumerate(self.evidence.dead().items()):
            worth, living = self.evidence.worth[name], self.dead[name] == 0
            off = not bool(living.any()) or not bool(self.evidence.switch[i])
            middle = worth.max() if off else worth[living].median()
            self.dead[name][dead & ((worth <= middle) | (worth < SURELY * units[name]))] = 1
        if all(bool(dead.all()) for dead in self.dead.values()):
            raise ValueError(
                f"gamma: {self.config.gamma:g} leaves nothing: no dimension is worth so much. With gamma "
                f"{float(self.start):.1g} about half of them would stay"
            )
