"""Network slimming: train weights and scores together, with l1 on the scores.

Liu et al., Learning efficient convolutional networks through network slimming, ICCV 2017, eq. 1:

    min over w, s of  L(w, s) + gamma * sum |s|

Where batch norms scale a group, the score of a dimension is that scale, as in the paper; its importance is the sum over
the norms it passes through, as its cost is (a residual stream passes through many). Elsewhere the score is a gate on
the columns that read the dimension. Two ways to step on the l1 term (eta is the learning rate of the scores):

    subgradient:  s <- optimiser step on  dL/ds + gamma * sign(s)                  (the paper's)
    proximal:     s <- S(optimiser step on dL/ds, eta * gamma),  S(s, t) = sign(s) * max(|s| - t, 0)

The proximal step reaches zero exactly; the sub-gradient goes to and fro around it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ..fields import NotNegative, Positive, Training
from ..gates import attach_
from ..groups import Group
from ..optimise import clip, optimiser, rate, set_rate
from . import RANKING, Job, Ranking, Search, SearchConfig, register_search


class NetslimConfig(SearchConfig, Training):
    """Joint training of weights and scores with l1 on the scores (Liu et al. 2017)."""

    method: Literal["netslim"] = "netslim"
    ranking: Ranking = Field("auto", description=RANKING)
    gamma: NotNegative = Field(1e-4, description="strength of l1 on the scores")
    update: Literal["subgradient", "proximal"] = Field("subgradient", description="how l1 is stepped on")
    score: Literal["auto", "gate"] = Field("auto", description="auto: the scale of batch norms where a group has any")
    score_lr: Positive | None = Field(None, description="learning rate of the scores, if not that of the weights")


@register_search("netslim")
class Netslim(Search):
    """l1 on the scales of batch norms, or on gates where there are none."""

    Config = NetslimConfig

    def __init__(self, config: NetslimConfig, job: Job) -> None:
        super().__init__(config, job)
        self.scales = {} if config.score == "gate" else _scales(job.model, job.groups)
        self.gates = attach_(job.model, [g for g in job.groups if g.name not in self.scales])
        masks: dict[nn.Parameter, Tensor] = {}  # where a score stands in its tensor
        for places in self.scales.values():
            for weight, index in places:
                masks.setdefault(weight, torch.zeros_like(weight)).view(-1)[index.flatten()] = 1
        masks |= {gate: torch.ones_like(gate) for gate in self.gates.values()}
        self.scores, self.masks = list(masks), list(masks.values())
        self.optimizer = optimiser(config, job.model.parameters(), self.scores, config.score_lr)
        self.optimizers = [self.optimizer]

    def step(self, batch: Any) -> dict[str, Tensor]:
        config, model, task = self.config, self.job.model, self.job.task
        set_rate(self.optimizer, rate(config, self.done, self.job.steps))
        self.done += 1
        self.optimizer.zero_grad()
        loss = task.loss(task.forward(model, batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        clip(config, model)
        with torch.no_grad():
            if config.update == "subgradient":
                self._add_subgradient_()
            self.optimizer.step()
            if config.update == "proximal":
                self._shrink_()
            penalty = config.gamma * torch.stack(torch._foreach_norm(self._masked(), 1)).sum()
        return {"loss": loss.detach() + penalty, "task": loss.detach(), "penalty": penalty}

    def importance(self) -> dict[str, Tensor]:
        """|score|, summed over the norms that a dimension passes through."""
        found = {name: gate.detach().abs() for name, gate in self.gates.items()}
        for name, places in self.scales.items():
            found[name] = torch.cat([weight.detach().abs()[index] for weight, index in places], dim=1).sum(1)
        return found

    def _masked(self) -> list[Tensor]:
        return list(torch._foreach_mul([s.detach() for s in self.scores], self.masks))

    def _add_subgradient_(self) -> None:
        signs = torch._foreach_sign(self._masked())
        for score in self.scores:
            if score.grad is None:  # nothing that the loss reads today
                score.grad = torch.zeros_like(score)
        torch._foreach_add_([s.grad for s in self.scores if s.grad is not None], signs, alpha=self.config.gamma)

    @torch.no_grad()
    def _shrink_(self) -> None:
        """Soft thresholding by eta * gamma, where the scores stand."""
        eta = self.optimizer.param_groups[-1]["lr"]
        for score, mask in zip(self.scores, self.masks, strict=True):
            small = score.sign() * (score.abs() - eta * self.config.gamma).clamp_min(0)
            score.copy_(torch.where(mask > 0, small, score))


def _scales(model: nn.Module, groups: Any) -> dict[str, list[tuple[nn.Parameter, Tensor]]]:
    """Group -> the batch norms' scales it passes through, with the positions of each of its dimensions."""
    modules = dict(model.named_modules())
    found: dict[str, list[tuple[nn.Parameter, Tensor]]] = {}

    def scale(path: str) -> nn.Parameter | None:
        owner, _, leaf = path.rpartition(".")
        module = modules[owner]
        weight = getattr(module, leaf)
        trained = isinstance(weight, nn.Parameter) and weight.requires_grad and weight.ndim == 1
        return weight if trained and leaf == "weight" and isinstance(module, nn.modules.batchnorm._BatchNorm) else None

    def places(group: Group) -> list[tuple[nn.Parameter, Tensor]]:
        return [
            (w, torch.as_tensor(s.index, device=w.device)) for s in group.slots if (w := scale(s.tensor)) is not None
        ]

    for group in groups:
        if here := places(group):
            found[group.name] = here
    return found
