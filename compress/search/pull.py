"""`gamma: auto`: a pull on the scores that follows from the budget, the cost of a dimension and the steps left.

A running mean of (alpha_i dL/dalpha_i)^2 says what dimension i is worth; per unit of the budget's cost it says which
dimensions lie below the budget's line: that is how many a group is to lose. Which ones it loses is said by their size,
the norm of the columns that read them times |alpha|, for what they are worth is known from a few batches, and an order
that changes from look to look draws at many dimensions and takes few to zero. Worth has a say in it, so that what is
worth nothing goes first, however large:

    place of i in its group:  ||W[:, i]||^2 alpha_i^2 worth_i^SAY

and the k-th of them is given the group's k-th largest worth. The line moves from the dense network to the budget over
the first part of the search, and what lies below it is drawn to zero:

    alpha_i <- sign(alpha_i) max(|alpha_i| - pull, 0),  pull = 1 / (PULL * steps)

When the line has come to the budget it stays, and a bound on what lies below it goes down to zero as well: what will be
cut is at zero some time before the search ends, and the weights learn to do without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn, optim

from . import Job
from .magnitude import sizes
from .penalty import soft_threshold

MEMORY = 0.98  # of the running mean of what a dimension is worth
MOVING = 0.5  # part of the search over which the budget's line moves
PULL = 0.4  # part of the search that a score takes from one to zero
LOOKS = 100  # times that the line is drawn anew
SAY = 0.25  # of worth in the order within a group


class Pull:
    """What each dimension is worth, which are drawn to zero, and the step that does it. Scores are gates."""

    def __init__(self, scores: Mapping[str, nn.Parameter], job: Job) -> None:
        self.scores, self.job = scores, job
        self.alpha = list(scores.values())
        self.worth = [torch.zeros_like(a) for a in self.alpha]
        self.below = [torch.zeros_like(a) for a in self.alpha]  # 1 where a score is drawn to zero

    def state(self) -> dict[str, Tensor]:
        mine = {f"{n}{i}": v for n, vs in (("worth", self.worth), ("below", self.below)) for i, v in enumerate(vs)}
        measured = getattr(self.job.line, "measured", None)  # times that the line goes by
        return mine if measured is None else mine | {"times": measured}

    def importance(self) -> dict[str, Tensor]:
        """What each dimension is worth: nothing where its score is zero, and something elsewhere."""
        least = torch.finfo(torch.float32).tiny
        size = sizes(self.job.model, self.job.groups)
        found = {}
        for (name, a), worth in zip(self.scores.items(), self.worth, strict=True):
            ways = self.job.groups[name].ways  # heads with dimensions of their own have an order each
            place = size[name].to(worth) * a.detach().square() * worth.pow(SAY)
            order = torch.where(a != 0, place, -1).view(ways, -1).argsort(dim=1, descending=True, stable=True)
            value = torch.where(a.detach() != 0, worth.clamp_min(least), 0.0).view(ways, -1)
            ranked = value.sort(dim=1, descending=True).values
            found[name] = torch.empty_like(value).scatter_(1, order, ranked).view(-1)
        return found

    @torch.no_grad()
    def step_(self, optimizer: optim.Optimizer, gradients: Sequence[Tensor], done: int) -> Tensor:
        """A step on the gradients; what lies below the line goes a little nearer to zero, and once there it stays.

        Returns the sum of what is still to be drawn to zero.
        """
        if self.job.line is None:
            raise ValueError("gamma: auto follows from the budget, and there is none; give gamma a number")
        steps = self.job.steps
        moving, pull = max(1, round(MOVING * steps)), 1 / max(1.0, PULL * steps)
        gone = [(low > 0) & (a == 0) for a, low in zip(self.alpha, self.below, strict=True)]
        self.weigh_(gradients)
        for a, g in zip(self.alpha, gradients, strict=True):
            a.grad = g
        optimizer.step()
        for a, dead in zip(self.alpha, gone, strict=True):
            a.masked_fill_(dead, 0)
        if done == moving or (done < moving and done % max(1, steps // LOOKS) == 0):
            self._draw(done / moving)
        most = 0.0 if done >= steps else max(0.0, 1 - (done - moving) * pull)
        for a, low in zip(self.alpha, self.below, strict=True):
            a.copy_(torch.where(low > 0, soft_threshold(a, pull).clamp(-most, most), a))
        return torch.stack([(low * a.abs()).sum() for a, low in zip(self.alpha, self.below, strict=True)]).sum()

    def weigh_(self, gradients: Sequence[Tensor]) -> None:
        """Say anew what each dimension is worth."""
        for a, g, w in zip(self.alpha, gradients, self.worth, strict=True):
            w.mul_(MEMORY).add_((a * g).square(), alpha=1 - MEMORY)

    def _draw(self, part: float) -> None:
        """Say anew what lies below the line, as long as there are numbers to go by: of others the loss will tell."""
        assert self.job.line is not None
        importance = self.importance()
        if not all(bool(value.isfinite().all()) for value in importance.values()):
            return
        keep = self.job.line(importance, part)
        for name, low in zip(self.scores, self.below, strict=True):
            low.fill_(1)
            low[torch.as_tensor(keep[name], device=low.device)] = 0
