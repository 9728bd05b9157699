"""BayesNAS on operations: free weights with switches, priors shared by the copies of a cell, pruning by entropy.

Zhou, Yang, Wang, Pan, BayesNAS: a Bayesian approach for neural architecture search, ICML 2019, algorithms 1 and 2.
Every place n of a choice has its own weights w_n and a switch sw_n, all 1 at the start, in place of a softmax:

    y_n = sw_n sum_o w_no O_o(x)                                                        (4.2)

The operation `none` has no weight: the switch takes its part. Weights, scores and switches are trained together (21),

    min  E + lambda_w sum over operations and switches of omega ||w||_2,  ||.|| over the places n = 1..N that share it

by proximal steps. `gamma` in the recipe is lambda_w; auto is 0.01. At the end of an outer iteration, by default the
only one, as the paper searches one epoch, with the curvature H_n of the loss in the weights of each place (A.3):

    C_n = 1 / (1 / gamma + H_n / lambda_w),  a_n = 1 / gamma - C_n / gamma^2
    omega = sqrt(sum_n a_n),  s = ||w*||_2 / omega
    gamma = 1 / (1 / s_sw + 1 / sum s_pred + 1 / s)                                     (8)

where w* = argmin over w of sum_n (H_n w_n^2 / 2 + (g_n - H_n w_n(t)) w_n) / lambda_w + omega ||w||_2 is the minimum of
(21) as the data see it at the end of the iteration (A.2.12 in group form), because one epoch does not reach it, and
s_pred are the operations on the edges into the node that the choice reads, if the network knows its nodes. An
operation is dropped where its entropy ln(2 pi e gamma) / 2 <= 0, at most half of a choice in an iteration and never
all: evidence considers one operation at a time, and each of several that help a little looks useless. The strength of
an operation is its gamma, that of `none` the gamma without entropy, 1 / (2 pi e): where no operation has entropy, the
edge is removed (4.2). Equal strengths, such as zero, are ordered by the saliency sum_n H_n v_n^2, v = w - g / H.

The penalty may shrink a switch and all weights behind it to zero, from where no gradient brings them back: a norm
behind them takes their scale, so that the loss does not resist. Without curvature there is no evidence, so the
operations of such a choice are ordered by how long their weights lasted; `notes` counts these choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from compress.data import derive_seed
from compress.distributed import all_reduce_mean_, world_size
from compress.modules import SearchSpace, Zero, module_mode
from compress.recipe import TrainingConfig

from ..base import Job, register_operation_search
from ..score_training import ScoredSearch
from ..score_training.regularizer import ScorePositions, ScoreRegularizer, group_soft_threshold, proximal_rates
from .curvature import Curvature, CurvatureKind, count_samples, describe_kind
from .evidence import ZERO_ENTROPY_VARIANCE, harmonic_sum, newton_point, significant_gradient
from .outer_iterations import MIN_SAMPLES, SAMPLE_FRACTION, OuterIterations

DEFAULT_LAMBDA = 0.01
SMALLEST = 1e-12
BISECTIONS = 50
TIE = 1e-9  # orders operations of equal variance
DROPPED = 1e-6  # factor on the strength of a dropped operation: below all that are kept


class GroupLasso(ScoreRegularizer):
    """lambda_w sum omega ||w||_2 by group soft thresholding; a row of `stacked` is one place of the group."""

    def __init__(self, groups: dict[str, list[nn.Parameter]], strength: float) -> None:
        self.groups, self.strength = groups, strength
        self.omega = {name: torch.ones_like(copies[0], requires_grad=False) for name, copies in groups.items()}

    def state(self) -> dict[str, Tensor]:
        return {f"omega{i}": omega for i, omega in enumerate(self.omega.values())}

    @torch.no_grad()
    def step_(self, optimizer: optim.Optimizer, gradients: Sequence[Tensor], done: int) -> Tensor:
        parameters = [a for copies in self.groups.values() for a in copies]
        for a, g in zip(parameters, gradients, strict=True):
            a.grad = g
        optimizer.step()
        value = parameters[0].new_zeros(())
        for name, copies in self.groups.items():
            rates = proximal_rates(optimizer, copies)
            tensors = [r for r in rates if isinstance(r, Tensor)]
            rate = torch.stack(tensors) if len(tensors) == len(rates) else rates[0]
            threshold = self.strength * self.omega[name]
            shrunk = group_soft_threshold(torch.stack([*copies]), threshold, rate, _sum_over_places)
            for a, row in zip(copies, shrunk, strict=True):
                a.copy_(row)
            value += (self.omega[name] * shrunk.norm(dim=0)).sum()
        return self.strength * value

    def importance(self) -> dict[str, Tensor]:
        return {name: torch.stack([*copies]).detach().norm(dim=0) for name, copies in self.groups.items()}


def _sum_over_places(value: Tensor) -> Tensor:
    return value.sum(0)


def group_weight(curvature: Tensor, variance: Tensor) -> Tensor:
    """Return omega of each operation (A.3.9), in the form sqrt(sum_n H_n / (1 + gamma H_n)) that holds for gamma = 0.

    Args:
        curvature: (places, operations), in units of lambda_w.
        variance: gamma of each operation, of the iteration before.
    """
    return (curvature / (1 + variance * curvature)).sum(0).sqrt()


def group_minimum(weights: Tensor, gradient: Tensor, curvature: Tensor, omega: Tensor) -> Tensor:
    """Return ||w*|| of each operation: the minimum of the quadratic model of the loss plus omega ||w||.

    With v the minimum of the quadratic model, w*_n = H_n v_n t / (H_n t + omega) where t = ||w*||; t is zero if
    ||H v|| <= omega, and else the root of ||H v / (H t + omega)|| = 1, which decreases in t.

    Args:
        weights: (places, operations), and so are the gradient and the curvature, in units of lambda_w.
    """
    pull = curvature * newton_point(weights, gradient, curvature)
    low, high = torch.zeros_like(omega), newton_point(weights, gradient, curvature).norm(dim=0)
    for _ in range(BISECTIONS):
        t = (low + high) / 2
        above = (pull / (curvature * t + omega).clamp_min(SMALLEST)).norm(dim=0) > 1
        low, high = torch.where(above, t, low), torch.where(above, high, t)
    return torch.where(pull.norm(dim=0) > omega, (low + high) / 2, 0.0)


@register_operation_search("bayesnas")
class BayesnasOperations(ScoredSearch):
    """Joint training of weights, free scores and switches, re-weighted by evidence."""

    def __init__(self, config: Any, job: Job) -> None:
        super().__init__(config, job)
        assert job.operations is not None
        copies = job.operations.groups
        self.places = {
            name: [c.free_weights for c in choices if c.free_weights is not None] for name, choices in copies.items()
        }
        self.switches = {name: [c.switch for c in choices if c.switch is not None] for name, choices in copies.items()}
        self.is_zero = {
            name: torch.tensor([isinstance(c, Zero) for c in choices[0].candidates.values()])
            for name, choices in copies.items()
        }
        self.predecessors = job.model.predecessors() if isinstance(job.model, SearchSpace) else {}
        all_places = [a for places in self.places.values() for a in places]
        scores = {f"{i}": a for i, a in enumerate(all_places)}
        kind: CurvatureKind = "auto" if config.hessian == "paper" else config.hessian
        self.curvature = Curvature(job.model, job.groups, scores, kind)
        self.variance = {name: torch.ones_like(places[0], requires_grad=False) for name, places in self.places.items()}
        self.dropped, self.saliency, self.steps_lasted = (
            {name: torch.zeros_like(gamma) for name, gamma in self.variance.items()} for _ in range(3)
        )
        self.gradient_sums = [torch.zeros_like(a, requires_grad=False) for a in self.alpha]
        self.steps_seen, self.samples_seen = (self.curvature.count.clone() for _ in range(2))
        self.iterations = OuterIterations.of(job, config.iterations or 1)

    def attach_operation_scores(self) -> ScorePositions:
        assert self.job.operations is not None
        positions: ScorePositions = {}
        for name, choices in self.job.operations.groups.items():
            for choice in choices:
                choice.attach_switch_()
                for key, a in ((name, choice.free_weights), (f"{name} switch", choice.switch)):
                    assert a is not None
                    positions.setdefault(key, []).append((a, torch.arange(len(a), device=a.device)[:, None]))
        return positions

    def operation_score_training(self) -> TrainingConfig:
        return self.config.alpha.merged_with(self.config)  # type: ignore[no-any-return]

    def make_operation_regularizer(self) -> ScoreRegularizer:
        groups = {name: [a for a, _ in positions] for name, positions in self.score_positions.items()}
        return GroupLasso(groups, DEFAULT_LAMBDA if self.config.gamma == "auto" else self.config.gamma)

    def step(self, batch: Any) -> dict[str, Tensor]:
        self.begin_step()
        self._sample(batch)
        terms = self.step_jointly(batch)
        with torch.no_grad():
            if self.iterations.is_last_step(self.done):
                self._update()
            for name, places in self.places.items():
                for a in places:
                    a.masked_fill_(self.dropped[name] > 0, 0)
                self.steps_lasted[name] += torch.stack([*places]).any(dim=0)
        return terms

    def importance(self) -> dict[str, Tensor]:
        """Return gamma of each operation, and that without entropy of `none`; those that are dropped come last."""
        strengths = {}
        for name, gamma in self.variance.items():
            ordered = gamma + TIE * (1 + self._tie_break(name))
            kept = torch.where(self.dropped[name] > 0, DROPPED * ordered, ordered)
            is_zero = self.is_zero[name].to(gamma.device)
            strengths[name] = torch.where(is_zero, torch.full_like(gamma, ZERO_ENTROPY_VARIANCE), kept)
        return strengths

    def _tie_break(self, name: str) -> Tensor:
        """Return what orders operations of equal variance, from 0 to 1."""
        saliency, weights = self.saliency[name], torch.stack([*self.places[name]]).detach().norm(dim=0)
        size = weights / weights.max().clamp_min(SMALLEST)
        lasted = (self.steps_lasted[name] + size) / (self.done + 1)
        return torch.where(saliency.max() > 0, saliency / saliency.max().clamp_min(SMALLEST), lasted)

    def switched_off(self) -> list[str]:
        """Return the groups of choices in which the penalty left no path: every switch or all weights are zero."""
        return [
            name
            for name, places in self.places.items()
            if not any(bool((switch * a).any()) for switch, a in zip(self.switches[name], places, strict=True))
        ]

    def scores(self) -> dict[str, Tensor]:
        return {name: torch.stack([*places]).detach().abs().mean(0) for name, places in self.places.items()}

    def notes(self) -> list[str]:
        kind = describe_kind(self.curvature.is_gauss_newton(self.job.task))
        count = sum(int(d.sum()) for d in self.dropped.values())
        total = sum(int((~z).sum()) for z in self.is_zero.values())
        notes = [f"curvature of the scores: {kind}", f"{count} of {total} operations were dropped by their entropy"]
        if off := self.switched_off():
            assert isinstance(self.regularizer, GroupLasso)
            names = ", ".join(off[:4]) + ", ..." * (len(off) > 4)
            notes.append(
                f"the penalty switched off {len(off)} of {len(self.places)} choices ({names}); the data then say "
                f"nothing about their operations. A search.gamma below {self.regularizer.strength:g} leaves more on"
            )
        return notes

    def state(self) -> dict[str, Tensor]:
        tables = {"variance": self.variance, "dropped": self.dropped, "saliency": self.saliency}
        tables["steps_lasted"] = self.steps_lasted
        own = {f"{key}{i}": value for key, table in tables.items() for i, value in enumerate(table.values())}
        own |= {f"gradient_sum{i}": total for i, total in enumerate(self.gradient_sums)}
        own |= {"steps_seen": self.steps_seen, "samples_seen": self.samples_seen}
        return super().state() | self.curvature.state() | own

    def _sample(self, batch: Any) -> None:
        """Add gradients, and the curvature on some samples of a batch, in the steps that end an outer iteration.

        Both are taken in eval mode, as in `Bayesnas`.
        """
        if not self.iterations.is_sampling_step(self.done):
            return
        size = count_samples(batch) * world_size()
        with module_mode(self.job.model, training=False):
            gradients = self.score_gradients(batch)[1]
        for total, gradient in zip(self.gradient_sums, gradients, strict=True):
            total.add_(gradient)
        self.steps_seen.add_(1)
        self.samples_seen.add_(size)
        samples = max(MIN_SAMPLES, SAMPLE_FRACTION * size * self.iterations.period)
        if self.config.samples is not None:
            samples = self.config.samples
        count = math.ceil(samples / self.iterations.sampling_steps / world_size())
        with torch.enable_grad(), self.job.gradient_computer.autocast():
            seed = derive_seed(self.job.seed, "curvature", self.done)
            self.curvature.add_(self.job.task, batch, count, self.config.distill, self._teacher_outputs, seed)

    def _update(self) -> None:
        """End an outer iteration: update omega and gamma, and drop operations by their entropy."""
        all_reduce_mean_([*self.curvature.tensors(), *self.gradient_sums, self.steps_seen, self.samples_seen])
        by_place, switch_curvature = self.curvature.mean()
        gradient_of = {id(a): total / self.steps_seen for a, total in zip(self.alpha, self.gradient_sums, strict=True)}
        regularizer = self.regularizer
        assert isinstance(regularizer, GroupLasso)
        unit = max(regularizer.strength, SMALLEST)
        noise = 1 / float(self.samples_seen)  # variance of a mean gradient over its curvature
        curvatures, start, s = list(by_place.values()), 0, {}
        for name, places in self.places.items():
            end = start + len(places)
            # The sampled curvature is that of a common factor of the weights: the switch times its own derivative.
            switches = torch.stack([*self.switches[name]])
            of_switch = switch_curvature[start:end, None] / switches.square().clamp_min(SMALLEST)
            parts = (
                (name, places, torch.stack(curvatures[start:end])),
                (f"{name} switch", self.switches[name], of_switch),
            )
            variances = []
            for key, parameters, h in parts:
                g = significant_gradient(torch.stack([gradient_of[id(a)] for a in parameters]), h, noise)
                gamma = self.variance.get(key, torch.ones_like(h[0]))
                omega = group_weight(h / unit, gamma)
                least = group_minimum(torch.stack([*parameters]), g / unit, h / unit, omega)
                regularizer.omega[key].copy_(omega)
                if key == name:
                    self.saliency[name].copy_((h * newton_point(torch.stack([*parameters]), g, h).square()).sum(0))
                variances.append(least / omega.clamp_min(SMALLEST))
            s[name] = harmonic_sum(*variances)
            start = end
        for name, own in s.items():
            before = [s[other][~self.is_zero[other].to(own.device)].sum() for other in self.predecessors.get(name, [])]
            self.variance[name].copy_(harmonic_sum(torch.stack(before).sum(), own) if before else own)
            offered = (self.dropped[name] == 0) & ~self.is_zero[name].to(own.device)
            strengths = torch.where(offered, self.importance()[name], -1)
            weakest = strengths < strengths[offered].sort().values[int(offered.sum()) // 2]
            self.dropped[name][offered & weakest & (self.variance[name] <= ZERO_ENTROPY_VARIANCE)] = 1
        self.curvature.clear_()
        for total in [*self.gradient_sums, self.steps_seen, self.samples_seen]:
            total.zero_()
