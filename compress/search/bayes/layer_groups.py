"""Groups of the weights of one layer, with the updates of BayesNAS, algorithm 3 (equations in bayes_compress.py)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from ..score_training.regularizer import group_soft_threshold
from .structures import as_ncmk, group_sums

SMALLEST = 1e-30  # to divide by in place of zero


class LayerGroups:
    """Groups of the weights of one layer: omega, gamma and whether a group is kept, by family."""

    def __init__(self, weight: nn.Parameter, families: list[str]) -> None:
        self.weight, self.families = weight, families
        ncmk = as_ncmk(weight.detach())
        self.omega = {family: torch.ones_like(group_sums(ncmk, family)) for family in families}
        self.gamma = {family: torch.ones_like(omega) for family, omega in self.omega.items()}
        self.kept = {family: torch.ones_like(omega) for family, omega in self.omega.items()}  # 0 where pruned
        self.squared_gradients = torch.zeros_like(weight.detach())  # sum over samples

    def tensors(self) -> list[Tensor]:
        tables = (self.omega, self.gamma, self.kept)
        return [self.squared_gradients, *(table[family] for table in tables for family in self.families)]

    @torch.no_grad()
    def shrink_(self, gamma: float, rate: float | Tensor) -> None:
        """Make the proximal step of each family, for the rates of `proximal_rates`; pruned groups stay at zero."""
        w = as_ncmk(self.weight.data)
        rate = as_ncmk(rate) if isinstance(rate, Tensor) else rate
        for family in self.families:
            sums = functools.partial(group_sums, family=family)
            w.copy_(group_soft_threshold(w, gamma * self.omega[family], rate, sums) * self.kept[family])

    def penalty(self) -> Tensor:
        """Return sum omega ||W||."""
        w = as_ncmk(self.weight.detach())
        terms = [(self.omega[f] * group_sums(w.square(), f).sqrt()).sum() for f in self.families]
        return torch.stack(terms).sum()

    def critical_gammas(self, h: Tensor) -> Tensor:
        """Return about the lambda of each group above which it is pruned: sum (h w)^2 / sum h."""
        w, h = as_ncmk(self.weight.detach()), as_ncmk(h)
        gammas = [group_sums((h * w).square(), f) / group_sums(h, f).clamp_min(SMALLEST) for f in self.families]
        return torch.cat([gamma.flatten() for gamma in gammas])

    @torch.no_grad()
    def update_(self, h: Tensor, prune: bool) -> None:
        """Update omega and gamma by (B.0.2)-(B.0.5), for curvatures over lambda; then prune if `prune`."""
        w, h = as_ncmk(self.weight.data), as_ncmk(h)
        for f in self.families:
            gamma = group_sums(w.square(), f).sqrt() / self.omega[f].clamp_min(SMALLEST)
            alpha = h / (1 + gamma * h)  # 1 / gamma - C / gamma^2
            self.omega[f].copy_(group_sums(alpha, f).sqrt())
            force = group_sums((h * w).square(), f).sqrt()  # ||H W_g||_2
            shrunk = (1 - self.omega[f] / force.clamp_min(SMALLEST)).clamp_min(0) * (force > 0)
            self.gamma[f].copy_(shrunk * group_sums(w.square(), f).sqrt() / self.omega[f].clamp_min(SMALLEST))
            if prune:
                self.kept[f].mul_(1 - self._pruned_now(f, shrunk, force))
        if prune:
            self.shrink_(0.0, 0.0)

    def _pruned_now(self, family: str, shrunk: Tensor, force: Tensor) -> Tensor:
        """Return 1 for groups to prune: where zero is the minimum, but not the better half of a family.

        The quadratic model considers one group at a time, and each of several redundant ones looks useless.
        """
        kept = self.kept[family] > 0
        relative_force = torch.where(kept, force / self.omega[family].clamp_min(SMALLEST), torch.inf)
        most = max(1, int(kept.sum()) // 2)
        threshold = relative_force.flatten().kthvalue(most).values
        return ((shrunk == 0) & ((relative_force <= threshold) | (force == 0))).to(shrunk.dtype)
