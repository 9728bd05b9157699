"""Budget regularizer for `gamma: auto`: shrink the scores of the dimensions that the budget will drop.

The saliency of dimension i is a running mean of (alpha_i dL/dalpha_i)^2. Saliency per unit of the budget's cost decides
how many dimensions of each group the pruning schedule drops at this point of the search. Which ones a group loses is
decided by their size, the norm of the gated weights times |alpha|. Saliency is estimated on a few batches, and an order
that changes from update to update would shrink many scores a little and few to zero. Saliency has a small influence, so
that useless dimensions are dropped first even if they are large:

    order of i in its group:  ||W[:, i]||^2 alpha_i^2 saliency_i^SALIENCY_EXPONENT

and the k-th of them gets the group's k-th largest saliency as its importance. The schedule moves from the dense network
to the budget over the first part of the search. The scores of the dimensions that it drops shrink to zero:

    alpha_i <- sign(alpha_i) max(|alpha_i| - shrinkage, 0),  shrinkage = 1 / (SHRINK_FRACTION * steps)

Once the schedule has reached the budget the set of dropped dimensions is fixed, and an upper bound on their scores
decreases to zero as well. The dropped dimensions are at zero some time before the search ends, so that the weights
adapt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn, optim

from compress.budget import PruningSchedule

from ..base import Job
from ..magnitude import squared_norms
from .regularizer import ScoreRegularizer, soft_threshold

SALIENCY_DECAY = 0.98  # of the running mean
SCHEDULE_FRACTION = 0.5  # fraction of the search in which the schedule moves to the budget
SHRINK_FRACTION = 0.4  # fraction of the search in which a score shrinks from one to zero
MASK_UPDATES = 100  # about how often the dropped dimensions are chosen in a search
SALIENCY_EXPONENT = 0.25  # of saliency in the order within a group


class BudgetRegularizer(ScoreRegularizer):
    """Saliency of each dimension, the dimensions to drop, and the step that shrinks their gates to zero."""

    def __init__(self, scores: Mapping[str, nn.Parameter], job: Job) -> None:
        self.scores, self.job = scores, job
        self.alpha = list(scores.values())
        self.saliency = [torch.zeros_like(a) for a in self.alpha]
        self.shrink_mask = [torch.zeros_like(a) for a in self.alpha]  # 1 where a score shrinks to zero

    def state(self) -> dict[str, Tensor]:
        tables = {"saliency": self.saliency, "shrink_mask": self.shrink_mask}
        own = {f"{key}{i}": tensor for key, tensors in tables.items() for i, tensor in enumerate(tensors)}
        schedule = self.job.schedule
        times = schedule.measured_times if isinstance(schedule, PruningSchedule) else None
        return own if times is None else own | {"times": times}

    def importance(self) -> dict[str, Tensor]:
        """Return the sorted saliency of each group in the order above: zero for zero scores, positive elsewhere."""
        smallest = torch.finfo(torch.float32).tiny
        norms = squared_norms(self.job.model, self.job.groups)
        importance = {}
        for (name, a), saliency in zip(self.scores.items(), self.saliency, strict=True):
            num_heads = self.job.groups[name].num_heads  # dimensions of each head are ordered separately
            key = norms[name].to(saliency) * a.detach().square() * saliency.pow(SALIENCY_EXPONENT)
            order = torch.where(a != 0, key, -1).view(num_heads, -1).argsort(dim=1, descending=True, stable=True)
            value = torch.where(a.detach() != 0, saliency.clamp_min(smallest), 0.0).view(num_heads, -1)
            ranked = value.sort(dim=1, descending=True).values
            importance[name] = torch.empty_like(value).scatter_(1, order, ranked).view(-1)
        return importance

    @torch.no_grad()
    def step_(self, optimizer: optim.Optimizer, gradients: Sequence[Tensor], done: int) -> Tensor:
        """Step the scores on the gradients, then shrink those of dropped dimensions; scores at zero stay there.

        Returns the sum of |alpha| over dropped dimensions.

        Raises:
            ValueError: there is no budget.
        """
        if self.job.schedule is None:
            raise ValueError("gamma: auto follows from the budget, and there is none; give gamma a number")
        steps = self.job.steps
        schedule_steps, shrinkage = max(1, round(SCHEDULE_FRACTION * steps)), 1 / max(1.0, SHRINK_FRACTION * steps)
        at_zero = [(mask > 0) & (a == 0) for a, mask in zip(self.alpha, self.shrink_mask, strict=True)]
        self.update_saliency_(gradients)
        for a, g in zip(self.alpha, gradients, strict=True):
            a.grad = g
        optimizer.step()
        for a, zero in zip(self.alpha, at_zero, strict=True):
            a.masked_fill_(zero, 0)
        if done == schedule_steps or (done < schedule_steps and done % max(1, steps // MASK_UPDATES) == 0):
            self._update_mask(done / schedule_steps)
        bound = 0.0 if done >= steps else max(0.0, 1 - (done - schedule_steps) * shrinkage)
        for a, mask in zip(self.alpha, self.shrink_mask, strict=True):
            a.copy_(torch.where(mask > 0, soft_threshold(a, shrinkage).clamp(-bound, bound), a))
        return torch.stack([(mask * a.abs()).sum() for a, mask in zip(self.alpha, self.shrink_mask, strict=True)]).sum()

    def update_saliency_(self, gradients: Sequence[Tensor]) -> None:
        """Update the running mean of (alpha dL/dalpha)^2."""
        for a, g, saliency in zip(self.alpha, gradients, self.saliency, strict=True):
            saliency.mul_(SALIENCY_DECAY).add_((a * g).square(), alpha=1 - SALIENCY_DECAY)

    def _update_mask(self, progress: float) -> None:
        """Mark the dimensions that the schedule drops now, unless saliency is not finite: then the loss is not."""
        assert self.job.schedule is not None
        importance = self.importance()
        if not all(bool(value.isfinite().all()) for value in importance.values()):
            return
        keep = self.job.schedule(importance, progress)
        for name, mask in zip(self.scores, self.shrink_mask, strict=True):
            mask.fill_(1)
            mask[torch.as_tensor(keep[name], device=mask.device)] = 0
