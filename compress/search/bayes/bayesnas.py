"""BayesNAS: scores have priors whose variance the data choose; a score is dropped if its prior has no entropy.

Zhou, Yang, Wang, Pan, BayesNAS: a Bayesian approach for neural architecture search, ICML 2019, algorithm 1, with the
score of a dimension in place of that of an edge. Weights and scores are trained together (16),

    min over W, w of  L(W, w) + gamma * sum omega_i |w_i|

where `gamma` is the paper's sparsity intensity lambda_w, proximal steps reach zero, and weight decay is the recipe's.
At the end of each outer iteration, one per epoch, the curvature of the scores is estimated on a few samples
(curvature.py), in eval mode like their slopes, and the variances of the priors, which are the importance, are updated
(evidence.py). With
`budget: auto` a dimension with ln(2 pi e variance) / 2 <= 0 is dropped then, at most half of a group in an iteration
unless its saliency is negligible; with a budget, the budget decides by the variances.

With `gamma: auto` there is no l1 penalty but the budget regularizer of the other searches (budget_regularizer.py), with
the evidence as saliency: w'^2 H per cost, which the variance increases with, and a running mean of the curvature.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from compress.data import derive_seed
from compress.distributed import all_reduce_mean_, world_size
from compress.modules import module_mode
from compress.recipe import HasKind, Ranking

from ..base import Job, register_search
from ..score_training import ScoredConfig, ScoredSearch
from ..score_training.budget_regularizer import MASK_UPDATES, BudgetRegularizer
from ..score_training.penalty import Penalty, relative_costs
from ..score_training.regularizer import ScorePositions, ScoreRegularizer
from .curvature import Curvature, CurvatureKind, count_samples, describe_clamped, describe_kind
from .evidence import Evidence, find_predecessors
from .outer_iterations import MIN_SAMPLES, SAMPLE_FRACTION, SAMPLING_FRACTION, OuterIterations

SMALLEST_LAMBDA = 1e-12
NEGLIGIBLE_SALIENCY = 0.01  # of lambda: dimensions below it are dropped at once, however many they are
MEAN_DECAY = 0.8  # of the running means of curvature, gradients and scores with `gamma: auto`


class BayesnasConfig(ScoredConfig):
    """Priors on the scores, with variances by evidence (Zhou et al. 2019)."""

    method: Literal["bayesnas"] = "bayesnas"
    ranking: Ranking = Field(
        "auto",
        description="how importance is compared across groups. auto: cost; global with penalty: macs",
    )
    hessian: CurvatureKind = Field(
        "auto",
        description="curvature of the scores. gauss_newton: if the task has `draw` (auto), else empirical (Fisher); "
        "paper: the paper's estimate (C.3.2)",
    )
    samples: int | None = Field(
        None, ge=1, description="samples for the curvature in an outer iteration (default: 5 %, at least 128)"
    )
    iterations: int | None = Field(None, ge=1, description="outer iterations (default: one per epoch)")

    @model_validator(mode="after")
    def _check_no_split(self) -> BayesnasConfig:
        if self.penalty.endswith("split"):
            raise ValueError(
                "penalty: bayesnas re-weights the scores and steps by soft thresholding; choose l1 or macs"
            )
        return self

    def ranking_for(self, groups: Iterable[HasKind], unit: str) -> Ranking:
        if self.ranking != "auto":
            return self.ranking
        return "global" if self.penalty == "macs" else "cost"

    @property
    def reaches_zero(self) -> bool:
        return self.gamma != "auto" and self.gamma > 0


class EvidenceRegularizer(BudgetRegularizer):
    """Budget regularizer whose saliency is that of the evidence."""

    evidence: Evidence  # set by the search

    def update_saliency_(self, gradients: Sequence[Tensor]) -> None:
        for saliency, updated in zip(self.saliency, self.evidence.saliency.values(), strict=True):
            saliency.copy_(updated)


@register_search("bayesnas")
class Bayesnas(ScoredSearch):
    """Joint training with l1 on the scores, re-weighted by evidence."""

    Config = BayesnasConfig

    def __init__(self, config: BayesnasConfig, job: Job) -> None:
        super().__init__(config, job)
        scores = self.gates()
        self.evidence = Evidence(scores, self.predecessors)
        self.curvature = Curvature(job.model, job.groups, scores, config.hessian)
        if isinstance(self.regularizer, EvidenceRegularizer):
            self.regularizer.evidence = self.evidence
        self.base_costs = self._base_costs()  # c_i, before they are multiplied by omega
        self.gradient_sums, self.score_sums, self.dropped = (
            {name: torch.zeros_like(a, requires_grad=False) for name, a in scores.items()} for _ in range(3)
        )
        self.steps_seen, self.samples_seen = (self.curvature.count.clone() for _ in range(2))  # in the sums
        self.median_gamma = self.steps_seen.clone()  # with this gamma half of the dimensions would be kept at first
        iterations = OuterIterations.of(job, config.iterations)
        if config.gamma == "auto":  # as often as the budget regularizer chooses the dimensions to drop
            period = max(1, job.steps // MASK_UPDATES)
            sampling_steps = max(1, round(SAMPLING_FRACTION * period))
            iterations = replace(iterations, period=period, sampling_steps=sampling_steps)
        self.iterations = iterations
        self.sampling_steps = max(1, job.steps // iterations.period) * iterations.sampling_steps / iterations.count

    def _base_costs(self) -> dict[str, Tensor]:
        scores = self.evidence.scores
        if isinstance(self.regularizer, Penalty):
            return {name: cost.clone() for name, cost in zip(scores, self.regularizer.costs, strict=True)}
        costs = relative_costs("macs", self.job, [*scores])
        return {name: torch.full_like(a, costs[name], requires_grad=False) for name, a in scores.items()}

    def attach_scores(self) -> ScorePositions:
        self.predecessors = find_predecessors(self.job.model, self.job.groups)
        return super().attach_scores()

    def make_regularizer(self) -> ScoreRegularizer:
        if self.config.gamma == "auto":
            return EvidenceRegularizer(self.gates(), self.job)
        proximal = self.config.model_copy(update={"proximal": True})
        return Penalty(proximal, self.alpha, self.score_positions, self.job)

    def step(self, batch: Any) -> dict[str, Tensor]:
        self.begin_step()
        self._sample_and_update(batch)
        terms = self.step_jointly(batch)
        with torch.no_grad():
            for name, a in self.evidence.scores.items():
                a.masked_fill_(self.dropped[name] > 0, 0)
        return terms

    def importance(self) -> dict[str, Tensor]:
        """Return the variance of each score's prior; zero if the score is at zero or dropped.

        Equal variances, such as zero, are ordered by saliency.
        """
        auto, smallest = self.config.gamma == "auto", torch.finfo(torch.float32).tiny
        importance = {}
        for name, a in self.evidence.scores.items():
            dropped = a.detach() == 0 if auto else self.dropped[name] > 0
            saliency = self.evidence.saliency[name]
            ordered = self.evidence.gamma[name] + smallest * (1 + saliency / (1 + saliency))
            importance[name] = torch.where(dropped, 0.0, ordered)
        return importance

    def notes(self) -> list[str]:
        kind = describe_kind(self.curvature.is_gauss_newton(self.job.task))
        if self.config.hessian == "paper":
            count, total = len(self.curvature.paper_layers), len(self.score_positions)
            kind = f"the paper's estimate for {count} of {total} groups, else {kind}"
        return [f"curvature of the scores: {kind}", *describe_clamped(self.evidence.clamped_counts, "scores")]

    def state(self) -> dict[str, Tensor]:
        tables = {
            "gradient_sum": self.gradient_sums,
            "score_sum": self.score_sums,
            "dropped": self.dropped,
            "base_cost": self.base_costs,
        }
        own = {f"{key}{i}": value for key, table in tables.items() for i, value in enumerate(table.values())}
        costs = self.regularizer.costs if isinstance(self.regularizer, Penalty) else []
        weighted = {f"weighted_cost{i}": cost for i, cost in enumerate(costs)}
        return (
            super().state()
            | self.evidence.state()
            | self.curvature.state()
            | own
            | weighted
            | {"steps_seen": self.steps_seen, "samples_seen": self.samples_seen, "median_gamma": self.median_gamma}
        )

    @torch.no_grad()
    def _sample_and_update(self, batch: Any) -> None:
        """Sample slopes and curvature, both in eval mode, and update the priors, in the steps in which either is due.

        In training mode a batch norm divides by what the scores of its input have in common, and the slope of a switch
        would be zero.
        """
        if self.done == 1 and self.job.schedule is None:
            self._sample(batch, MIN_SAMPLES)
            curvatures = zip(self.curvature.mean()[0].values(), self.base_costs.values(), strict=True)
            self.median_gamma.copy_(torch.cat([h / cost for h, cost in curvatures]).median())
            self.curvature.clear_()
        if self.iterations.is_sampling_step(self.done):
            with module_mode(self.job.model, training=False), torch.enable_grad():
                slopes = self.score_gradients(batch)[1]
            for (name, a), g in zip(self.evidence.scores.items(), slopes, strict=True):
                self.gradient_sums[name].add_(g)
                self.score_sums[name].add_(a)
            self.steps_seen.add_(1)
            size = count_samples(batch) * world_size()
            self.samples_seen.add_(size)
            samples = max(MIN_SAMPLES, SAMPLE_FRACTION * size * self.job.steps / self.iterations.count)
            self._sample(batch, samples / self.sampling_steps)
        if self.iterations.is_last_step(self.done):
            self._update()

    def _sample(self, batch: Any, count: float) -> None:
        """Add the curvature on `count` samples, or on as many as the recipe says."""
        if self.config.samples is not None:
            count = self.config.samples / self.sampling_steps
        count = math.ceil(count / world_size())
        with torch.enable_grad(), self.job.gradient_computer.autocast():
            seed = derive_seed(self.job.seed, "curvature", self.done)
            self.curvature.add_(self.job.task, batch, count, self.config.distill, self._teacher_outputs, seed)

    def _update(self) -> None:
        """End an outer iteration: update the priors by (17)-(20), and drop dimensions by entropy."""
        sums = [
            *self.gradient_sums.values(),
            *self.score_sums.values(),
            self.steps_seen,
            self.samples_seen,
            *self.curvature.tensors(),
        ]
        all_reduce_mean_(sums)  # the sums and their counts keep their ratio
        h, switch_curvature = self.curvature.mean()
        g, w = ({n: v / self.steps_seen for n, v in table.items()} for table in (self.gradient_sums, self.score_sums))
        auto = self.config.gamma == "auto"
        data_fraction = 0.0 if auto else float(self.steps_seen) / self.iterations.period  # of the iteration's data
        noise = max(0.0, 1 - data_fraction) / float(self.samples_seen)
        self.evidence.update_saliency_(w, g, h, noise)
        lambdas = self._lambdas()
        self.evidence.update_(w, g, switch_curvature, lambdas, noise)
        for tensor in sums:
            tensor.mul_(MEAN_DECAY if auto else 0)
        if isinstance(self.regularizer, Penalty):
            for cost, base_cost, omega in zip(
                self.regularizer.costs, self.base_costs.values(), self.evidence.omega.values(), strict=True
            ):
                cost.copy_(base_cost * omega)
            if self.job.schedule is None:
                self._drop(lambdas)

    def _lambdas(self) -> dict[str, Tensor]:
        """Return lambda of each group: gamma times its cost.

        With `gamma: auto`, gamma is the smallest saliency per cost of a dimension that is kept.
        """
        if isinstance(self.regularizer, BudgetRegularizer):
            tables = (self.evidence.saliency.values(), self.base_costs.values(), self.regularizer.shrink_mask)
            per_cost = [torch.where(mask > 0, torch.inf, v / cost) for v, cost, mask in zip(*tables, strict=True)]
            gamma = torch.cat(per_cost).min()
        else:
            gamma = torch.tensor(self.config.gamma)
        return {name: (gamma.to(cost) * cost[0]).clamp_min(SMALLEST_LAMBDA) for name, cost in self.base_costs.items()}

    def _drop(self, lambdas: Mapping[str, Tensor]) -> None:
        """Drop the dimensions whose prior has no entropy, but keep the better half of a group for this iteration.

        Evidence considers one dimension at a time, and each of several redundant ones looks useless. A group whose
        switch has variance zero is dropped at once, and so are dimensions of negligible saliency.

        Raises:
            ValueError: nothing would be left.
        """
        for i, (name, low_entropy) in enumerate(self.evidence.low_entropy().items()):
            saliency, kept = self.evidence.saliency[name], self.dropped[name] == 0
            whole_group = not bool(kept.any()) or not bool(self.evidence.switch_variance[i])
            threshold = saliency.max() if whole_group else saliency[kept].median()
            negligible = saliency < NEGLIGIBLE_SALIENCY * lambdas[name]
            self.dropped[name][low_entropy & ((saliency <= threshold) | negligible)] = 1
        if all(bool(dropped.all()) for dropped in self.dropped.values()):
            raise ValueError(
                f"gamma: {self.config.gamma:g} leaves nothing: it drops every dimension. With gamma "
                f"{float(self.median_gamma):.1g} about half of them would stay"
            )
