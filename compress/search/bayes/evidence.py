"""Evidence of the data for the prior variance of every score (BayesNAS, eq. 17-20, A.2.8-A.2.14).

Scores w have priors N(0, gamma). With the loss L, its mean gradient g and curvature H in a score, and the sparsity
intensity lambda, the negative log posterior in units of lambda is L / lambda + sum w^2 / (2 gamma): lambda = 1 / N is
the likelihood of N samples, a larger one a tempered likelihood. All below is in these units (H and g over lambda); the
paper multiplies the penalty by lambda and leaves the curvature alone, so that (16) and (17) are not one objective.

    C     = (1 / gamma(t-1) + H)^-1                                            (17)
    omega = sqrt(gamma(t-1) - C) / gamma(t-1) = sqrt(H / (1 + gamma(t-1) H))   (18)
    w     = argmin w^2 H / 2 + (g - H w) w + omega |w| = S(w - g / H, omega / H)   (A.2.12), S the soft threshold
    s     = |w| / omega                                                        (19), A.2.13
    gamma = (1 / s' + 1 / sum over predecessors of s + 1 / s)^-1               (20): A.2.14, and (8) with a switch s'

w minimizes the quadratic model around the trained score: where the loss is flat, training moves a score too slowly for
the trained value to be meaningful (s would grow as the curvature falls). Without predecessors the fixed point is that
of sparse Bayesian regression, gamma = w'^2 - 1 / H with w' = w - g / H, and zero where w'^2 H <= 1. A score is dropped
where gamma <= 1 / (2 pi e): near w' = 1 if the loss would rise by less than about lambda / 2 without it, and for
|w'| <= 0.242 whatever the curvature. A score without curvature has no evidence, and variance zero.
The saliency of a score is w'^2 H, twice the rise of the loss without it.

The switch of a group is a factor that all its scores have in common. It lets a whole branch be dropped where no single
dimension would be. It is not trained; the scores absorb it. The predecessors of a group are the groups that feed the
layers that write it, directly or through residual streams that are not cut. Other inputs of these layers, such as the
stem on such a stream, have no score; together they count as one more predecessor, with a score of one and s = 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress.graph import Group, Groups

from ..score_training.regularizer import soft_threshold
from .curvature import clamp_curvature

GroupValues = Mapping[str, Tensor]  # by group
ZERO_ENTROPY_VARIANCE = 1 / (2 * math.pi * math.e)  # where the entropy ln(2 pi e gamma) / 2 of the prior is zero
UNSCORED_VARIANCE = 1.0  # of an input without a score: the square of a score of one


def penalty_weight(gamma: Tensor, h: Tensor) -> Tensor:
    """Return omega by (17) and (18), in a form that also holds for gamma = 0 and H = 0."""
    return (h / (1 + gamma * h)).sqrt()


def newton_point(w: Tensor, g: Tensor, h: Tensor) -> Tensor:
    """Return w' = w - g / h, limited to the range from 0 to 2 w, where the quadratic model is trusted.

    If few samples use a dimension, a curvature from some of them and a gradient from others may be inconsistent.
    """
    return w - (g / h.clamp_min(smallest_divisor(h))).clamp(-w.abs(), w.abs())


def significant_gradient(g: Tensor, h: Tensor, noise: float) -> Tensor:
    """Shrink a gradient by two standard errors; zero where it is not finite."""
    return soft_threshold(g, 2 * (noise * h).sqrt()).nan_to_num(0, 0, 0)


def score_evidence(w: Tensor, g: Tensor, h: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Return omega (18) and s (19) of scores w, with gradient g and curvature h in units of lambda."""
    omega = penalty_weight(gamma, h)
    best = soft_threshold(newton_point(w, g, h), omega / h.clamp_min(smallest_divisor(h)))
    best = torch.where(h > 0, best, torch.zeros_like(w))
    return omega, torch.where(omega > 0, best.abs() / omega.clamp_min(smallest_divisor(h)), 0.0)


def smallest_divisor(like: Tensor) -> float:
    """Return a number to divide by in place of zero."""
    return math.sqrt(torch.finfo(like.dtype).tiny)


def harmonic_sum(*variances: Tensor) -> Tensor:
    """Return (sum of 1 / v)^-1, which is zero if one of the variances is."""
    total = 1 / variances[0]
    for variance in variances[1:]:
        total = total + 1 / variance
    return 1 / total


class Predecessors(NamedTuple):
    """Groups and other inputs that feed the layers which write a group."""

    groups: list[str]
    unscored: bool = False  # whether they have other inputs as well, such as the stem of a residual stream


class Evidence:
    """Variance gamma and penalty weight omega of every score, and the variance of every group's switch."""

    def __init__(self, scores: Mapping[str, nn.Parameter], predecessors: Mapping[str, Predecessors]) -> None:
        self.scores, self.predecessors = scores, predecessors
        self.gamma, self.omega, self.saliency, self.curvature, self.gradient = (
            {name: torch.ones_like(a, requires_grad=False) for name, a in scores.items()} for _ in range(5)
        )
        first = next(iter(scores.values()))
        self.switch_variance = first.detach().new_ones(len(scores))  # zero where a whole group can be dropped
        self.clamped_counts = first.detach().new_zeros(2)  # negative and non-finite curvatures so far

    def state(self) -> dict[str, Tensor]:
        tables = {
            "gamma": self.gamma,
            "omega": self.omega,
            "saliency": self.saliency,
            "curvature": self.curvature,
            "gradient": self.gradient,
        }
        own = {f"evidence/{key}{i}": value for key, table in tables.items() for i, value in enumerate(table.values())}
        return own | {"evidence/switches": self.switch_variance, "evidence/clamped": self.clamped_counts}

    @torch.no_grad()
    def update_saliency_(self, w: GroupValues, g: GroupValues, h: GroupValues, noise: float) -> None:
        """Set curvature, gradient and saliency from means of scores, gradients and curvatures.

        Args:
            noise: variance of a gradient over its curvature; for a likelihood the two are proportional.
        """
        for name, curvature in self.curvature.items():
            curvature.copy_(clamp_curvature(h[name], self.clamped_counts))
            self.gradient[name].copy_(significant_gradient(g[name], curvature, noise))
            self.saliency[name].copy_(newton_point(w[name], self.gradient[name], curvature).square() * curvature)

    @torch.no_grad()
    def update_(
        self, w: GroupValues, g: GroupValues, switch_curvature: Tensor, lambdas: GroupValues, noise: float
    ) -> None:
        """Set omega, gamma and the switches by (17)-(20); `lambdas` is lambda by group."""
        s: dict[str, Tensor] = {}
        for i, (name, curvature) in enumerate(self.curvature.items()):
            lambda_, whole_curvature = lambdas[name], clamp_curvature(switch_curvature[i], self.clamped_counts)
            omega, own = score_evidence(w[name], self.gradient[name] / lambda_, curvature / lambda_, self.gamma[name])
            self.omega[name].copy_(omega)
            switch_gradient = significant_gradient((w[name] * g[name]).sum(), whole_curvature, noise)
            _, switch = score_evidence(
                torch.ones_like(switch_gradient),
                switch_gradient / lambda_,
                whole_curvature / lambda_,
                self.switch_variance[i],
            )
            self.switch_variance[i].copy_(switch)
            s[name] = harmonic_sum(switch, own)
        for name, own in s.items():
            before = self.predecessors[name]
            inputs = [s[other].sum() for other in before.groups]
            unscored = UNSCORED_VARIANCE if before.unscored else 0.0
            self.gamma[name].copy_(harmonic_sum(torch.stack(inputs).sum() + unscored, own) if inputs else own)

    def low_entropy(self) -> dict[str, Tensor]:
        """Return where the entropy of the prior is not above zero, by group."""
        return {name: gamma <= ZERO_ENTROPY_VARIANCE for name, gamma in self.gamma.items()}


def find_predecessors(model: nn.Module, groups: Groups) -> dict[str, Predecessors]:
    """Return the groups that feed the layers which write each group, directly or through streams that are not cut.

    What later layers write to such a stream is not among them; groups are in the order of the run.
    """
    modules, tensors = dict(model.named_modules()), dict(model.named_parameters())
    scored_inputs, uncut_inputs = (_inputs_of_layers(some) for some in (groups.offered, groups.uncut))
    uncut, order = {group.name: group for group in groups.uncut}, [group.name for group in groups]

    def collect(group: Group, names: dict[str, None], seen: set[str]) -> bool:
        """Add the predecessors of a group to `names`; return whether a part of the input has no score."""
        unscored = False
        for slot in group.output_slots:
            weight, layer = tensors.get(slot.tensor), modules[slot.tensor.rpartition(".")[0]]
            if weight is None or weight.ndim < 2 or slot.dim > 1:
                continue
            if getattr(layer, "groups", 1) > 1:
                unscored |= weight.shape[1] > 1  # a group passes through a depthwise layer
                continue
            key = (slot.tensor, 1 - slot.dim)
            scored, streams = scored_inputs.get(key, {}), uncut_inputs.get(key, {})
            names |= dict.fromkeys(scored)
            unscored |= sum([*scored.values(), *streams.values()]) < weight.shape[1 - slot.dim]
            for stream in streams:
                if stream not in seen:
                    seen.add(stream)
                    unscored |= collect(uncut[stream], names, seen)
        return unscored

    predecessors = {}
    for group in groups:
        names: dict[str, None] = {}  # an ordered set
        seen: set[str] = set()
        unscored = collect(group, names, seen)
        earlier = order[: order.index(group.name)] if seen else order
        predecessors[group.name] = Predecessors(
            [name for name in names if name != group.name and name in earlier], unscored
        )
    return predecessors


def _inputs_of_layers(groups: Iterable[Group]) -> dict[tuple[str, int], dict[str, int]]:
    """Return (weight, dim) -> group -> number of its positions there, for the layers that read groups."""
    inputs: dict[tuple[str, int], dict[str, int]] = {}
    for group in groups:
        for slot in group.gated_slots if not group.gated_on_output else ():
            inputs.setdefault((slot.tensor, slot.dim), {})[group.name] = slot.index.size
    return inputs
