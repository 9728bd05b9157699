"""Evidence: what the data say about the prior variance of every score (BayesNAS, eq. 17-20, A.2.8-A.2.14).

Scores w have priors N(0, gamma). With the loss L, its mean gradient g and curvature H in a score, and the sparsity
intensity lambda, the negative log posterior in units of lambda is L / lambda + sum w^2 / (2 gamma): lambda = 1 / N is
the likelihood of N samples, a larger one a tempered likelihood. All below is in these units (H and g over lambda); the
paper multiplies the penalty by lambda and leaves the curvature alone, so that (16) and (17) are not one objective.

    C     = (1 / gamma(t-1) + H)^-1                                            (17)
    omega = sqrt(gamma(t-1) - C) / gamma(t-1) = sqrt(H / (1 + gamma(t-1) H))   (18)
    w     = argmin w^2 H / 2 + (g - H w) w + omega |w| = S(w - g / H, omega / H)   (A.2.12), S the soft threshold
    s     = |w| / omega                                                        (19), A.2.13
    gamma = (1 / s' + 1 / sum over predecessors of s + 1 / s)^-1               (20): A.2.14, and (8) with a switch s'

w minimises the quadratic model around the trained score: training moves a score with a flat loss too slowly for the
trained value to say what it is worth (s would grow as the curvature falls). Without predecessors the fixed point is
that of sparse Bayesian regression, gamma = w'^2 - 1 / H with w' = w - g / H, and zero where w'^2 H <= 1: a score goes
if the loss would rise by less than lambda / 2 without it. What no data bend has no evidence, and variance zero.

The switch of a group is a factor that all its scores have in common: with it a whole branch goes, where no single
dimension would. It is not trained; the scores take it in. Predecessors of a group are the groups that feed the layers
that write it; a group that anything else feeds as well has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..curvature import sound
from ..groups import Groups
from .penalty import soft_threshold

Means = Mapping[str, Tensor]  # by group
THRESHOLD = 1 / (2 * math.pi * math.e)  # of gamma: the entropy ln(2 pi e gamma) / 2 of the prior is zero there


def weight_of(gamma: Tensor, h: Tensor) -> Tensor:
    """omega: by (17) and (18), written so that gamma = 0 and H = 0 are no exceptions."""
    return (h / (1 + gamma * h)).sqrt()


def newton(w: Tensor, g: Tensor, h: Tensor) -> Tensor:
    """w' = w - g / h, no nearer than zero and no further than twice w: there the quadratic model is trusted.

    Of a dimension that few samples use, a curvature from some of them and a gradient from others need not go together.
    """
    return w - (g / h.clamp_min(tiny(h))).clamp(-w.abs(), w.abs())


def sure(g: Tensor, h: Tensor, noise: float) -> Tensor:
    """A gradient as far as it is two standard errors from zero; zero where it is no number."""
    return soft_threshold(g, 2 * (noise * h).sqrt()).nan_to_num(0, 0, 0)


def evidence(w: Tensor, g: Tensor, h: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """omega (18) and s (19) of scores w, with gradient g and curvature h in units of lambda."""
    omega = weight_of(gamma, h)
    best = soft_threshold(newton(w, g, h), omega / h.clamp_min(tiny(h)))
    best = torch.where(h > 0, best, torch.zeros_like(w))
    return omega, torch.where(omega > 0, best.abs() / omega.clamp_min(tiny(h)), 0.0)


def tiny(like: Tensor) -> float:
    """What to divide by in place of zero."""
    return math.sqrt(torch.finfo(like.dtype).tiny)


def together(*variances: Tensor) -> Tensor:
    """(sum of 1 / v)^-1: zero where one of them is."""
    total = 1 / variances[0]
    for variance in variances[1:]:
        total = total + 1 / variance
    return 1 / total


class Evidence:
    """gamma and omega of every score, and of every group's switch."""

    def __init__(self, scores: Mapping[str, nn.Parameter], before: Mapping[str, list[str]]) -> None:
        self.scores, self.before = scores, before
        self.gamma, self.omega, self.worth, self.bent, self.slope = (
            {name: torch.ones_like(a, requires_grad=False) for name, a in scores.items()} for _ in range(5)
        )
        first = next(iter(scores.values()))
        self.switch = first.detach().new_ones(len(scores))
        self.clamped = first.detach().new_zeros(2)  # curvatures so far that were negative, or no numbers

    def state(self) -> dict[str, Tensor]:
        tables = {"prior": self.gamma, "omega": self.omega, "worth": self.worth, "bent": self.bent, "slope": self.slope}
        mine = {f"{n}{i}": v for n, table in tables.items() for i, v in enumerate(table.values())}
        return mine | {"switch": self.switch, "clamped": self.clamped}

    @torch.no_grad()
    def weigh_(self, w: Means, g: Means, h: Means, noise: float) -> None:
        """Take in means of scores, gradients and curvatures, and what each score is worth by them: twice what the loss
        rises by without it. `noise` times the curvature is the variance of a gradient, as that of a likelihood is.
        """
        for name, bent in self.bent.items():
            bent.copy_(sound(h[name], self.clamped))
            self.slope[name].copy_(sure(g[name], bent, noise))
            self.worth[name].copy_(newton(w[name], self.slope[name], bent).square() * bent)

    @torch.no_grad()
    def update_(self, w: Means, g: Means, switches: Tensor, units: Means, noise: float) -> None:
        """(17)-(20), with the curvatures of the switches; `units` has lambda by group."""
        s: dict[str, Tensor] = {}
        for i, (name, bent) in enumerate(self.bent.items()):
            unit, whole = units[name], sound(switches[i], self.clamped)
            omega, own = evidence(w[name], self.slope[name] / unit, bent / unit, self.gamma[name])
            self.omega[name].copy_(omega)
            slope = sure((w[name] * g[name]).sum(), whole, noise)
            _, branch = evidence(torch.ones_like(slope), slope / unit, whole / unit, self.switch[i])
            self.switch[i].copy_(branch)
            s[name] = together(branch, own)
        for name, own in s.items():
            feeding = [s[other].sum() for other in self.before[name]]
            self.gamma[name].copy_(together(torch.stack(feeding).sum(), own) if feeding else own)

    def dead(self) -> dict[str, Tensor]:
        """Where the prior's entropy is not above zero."""
        return {name: gamma <= THRESHOLD for name, gamma in self.gamma.items()}


def predecessors(model: nn.Module, groups: Groups) -> dict[str, list[str]]:
    """Group -> the groups that feed the layers which write it; none where anything else feeds one of them."""
    modules = dict(model.named_modules())
    tensors = dict(model.named_parameters())
    reading: dict[tuple[str, int], dict[str, int]] = {}  # weight, dim -> group -> positions that it takes there
    for group in groups:
        for slot in group.readers if not group.product else ():
            reading.setdefault((slot.tensor, slot.dim), {})[group.name] = slot.index.size
    found: dict[str, list[str]] = {}
    for group in groups:
        feeding: dict[str, None] = {}
        for slot in group.writers:
            weight, layer = tensors.get(slot.tensor), modules[slot.tensor.rpartition(".")[0]]
            if weight is None or weight.ndim < 2 or slot.dim > 1:
                continue
            if getattr(layer, "groups", 1) > 1 and weight.shape[1] == 1:  # depthwise: the group passes through it
                continue
            here = reading.get((slot.tensor, 1 - slot.dim), {})
            if getattr(layer, "groups", 1) > 1 or sum(here.values()) < weight.shape[1 - slot.dim]:
                feeding = {}
                break
            feeding |= dict.fromkeys(here)
        found[group.name] = [name for name in feeding if name != group.name]
    return found
