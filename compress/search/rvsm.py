"""RVSM: relaxed variable splitting on the weights, one by one or in the groups that read a dimension.

F. Xue, Relaxation and Optimization for Automated Learning of Neural Network Architectures, 2022, 2.1.2 and 4.1.1, after
Dinh and Xin, Convergence of a relaxed variable splitting method for learning sparse neural networks, 2018. With a copy
u of the weights w, gamma for the thesis' lambda and split for its beta,

    min over w, u of  L(w) + gamma P(u) + split / 2 ||u - w||^2

is minimized in turn (2.6):

    w(t+1) = w(t) - eta (grad L(w(t)) + split (w(t) - u(t)))
    u(t+1) = argmin over u of gamma P(u) + split / 2 ||u - w(t)||^2

P is l1, l0 or transformed l1 of single weights, or of the norms ||w_g|| of groups. A norm does not depend on the
direction, so the u of a group is w_g times threshold(||w_g||) / ||w_g||, with the threshold of a single weight. A group
holds all weights that read a dimension, so that a dimension whose group is zero can be removed exactly. A weight that
reads dimensions of two groups gets the factors of both.

At the end, weights whose u is zero are set to zero; with a budget, which may keep dimensions at zero, only single
weights. The importance of a dimension is the norm of its u.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.modules import tensors_of
from compress.recipe import RANKING_DESCRIPTION, LogitDistillation, Positive, Ranking, SearchConfig, TrainingConfig
from compress.training import lr_factor, make_optimizer, set_lr_

from .base import Job, Search, register_search
from .score_training.regularizer import SPARSE_PENALTIES
from .task_gradients import clip_and_step, set_task_gradients_

TIE = 1e-20  # orders dimensions whose sparse copy is zero


class RvsmConfig(SearchConfig, TrainingConfig):
    """Relaxed variable splitting on weights or groups of weights (Xue 2022, 2.1.2)."""

    method: Literal["rvsm"] = "rvsm"
    ranking: Ranking = Field("auto", description=RANKING_DESCRIPTION.format("balanced", "group"))
    groups: Literal["dimensions", "weights"] = Field(
        "dimensions",
        description="dimensions: all weights that read a dimension are a group; weights: every weight by itself",
    )
    penalty: Literal["l1", "l0", "tl1"] = Field(
        "l1", description="of the norms of the groups, or of the weights; tl1: transformed l1, 2 |u| / (1 + |u|)"
    )
    gamma: Positive = Field(1e-2, description="strength of the penalty, lambda in the thesis")
    split: Positive = Field(0.1, description="strength of the coupling of the weights and their sparse copy, beta")
    distill: LogitDistillation | None = Field(None, description="distillation from the dense model during the search")

    @property
    def reaches_zero(self) -> bool:
        return True

    @property
    def trains_scores(self) -> bool:
        return True

    @property
    def removes_structures(self) -> bool:
        return self.groups == "weights"


@register_search("rvsm")
class Rvsm(Search):
    """Training of the weights, drawn to a sparse copy."""

    Config = RvsmConfig

    def __init__(self, config: RvsmConfig, job: Job) -> None:
        super().__init__(config, job)
        self.weights = [p for p in job.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(config, self.weights)
        self.optimizers = [self.optimizer]
        self.penalized = self._penalized_weights()
        reading = {slot.tensor for group in job.groups for slot in group.gated_slots}
        self.fixed = {name: t for name, t in tensors_of(job.model).items() if name in reading - self.penalized.keys()}
        if not self.penalized:
            raise ValueError(
                "search.method: rvsm trains the weights that read the dimensions, and all of them are frozen "
                f"(requires_grad is false), {min(reading, default='none')} among them. Unfreeze them, or choose a "
                "method that trains scores, such as netslim"
            )
        self.sparse_copies = {name: w.detach().clone() for name, w in self.penalized.items()}  # u

    def _penalized_weights(self) -> dict[str, nn.Parameter]:
        """Return the trained weights that read a dimension; also others but biases and norms if each is by itself."""
        reading = {slot.tensor for group in self.job.groups for slot in group.gated_slots}
        by_itself = self.config.groups == "weights"
        trained = {name: p for name, p in self.job.model.named_parameters() if p.requires_grad}
        return {name: p for name, p in trained.items() if name in reading or (by_itself and p.ndim > 1)}

    def step(self, batch: Any) -> dict[str, Tensor]:
        set_lr_(self.optimizer, lr_factor(self.config, self.done, self.job.steps))
        self.done += 1
        loss = set_task_gradients_(self.job, self.weights, batch, self.config.distill)
        with torch.no_grad():
            penalty, coupling = self._penalty(), loss.new_zeros(())
            updated = self._minimum()  # of the weights before their step
            for name, w in self.penalized.items():
                difference = w - self.sparse_copies[name]
                coupling += self.config.split / 2 * difference.square().sum()
                w.grad = self.config.split * difference + (0 if w.grad is None else w.grad)
        clip_and_step(self.optimizer, self.weights, self.config.clip)
        for name, u in self.sparse_copies.items():
            u.copy_(updated[name])
        return {"loss": loss + penalty + coupling, "task": loss, "penalty": penalty, "coupling": coupling}

    @torch.no_grad()
    def finish(self) -> None:
        """Set the weights to zero whose sparse copy is zero; those of dimensions only if no budget decides on them."""
        for name, u in self._minimum().items():
            self.sparse_copies[name].copy_(u)
            if self.config.groups == "weights" or self.job.schedule is None:
                self.penalized[name].masked_fill_(u == 0, 0)

    def importance(self) -> dict[str, Tensor]:
        """Return the norm of the sparse copy of the weights that read each dimension; frozen ones count as they are.

        With a budget, dimensions at zero are ordered by the norm of their weights, far below the others.
        """
        read = {**self.sparse_copies, **self.fixed}
        importance = {name: norm.sqrt() for name, norm in self._squared_norms(read).items()}
        if self.job.schedule is None:
            return importance
        norms = self._squared_norms({name: w.detach() for name, w in self.penalized.items()})
        return {name: value + TIE * norms[name] / (1 + norms[name]) for name, value in importance.items()}

    def state(self) -> dict[str, Tensor]:
        return {f"sparse{i}": u for i, u in enumerate(self.sparse_copies.values())}

    @property
    def _threshold(self) -> Callable[[Tensor], Tensor]:
        t, threshold = self.config.gamma / self.config.split, SPARSE_PENALTIES[self.config.penalty].threshold
        return lambda value: threshold(value, t)

    def _minimum(self) -> dict[str, Tensor]:
        """Return argmin over u of gamma P(u) + split / 2 ||u - w||^2 for the weights as they are."""
        if self.config.groups == "weights":
            return {name: self._threshold(w.detach()) for name, w in self.penalized.items()}
        minimum = {name: w.detach().clone() for name, w in self.penalized.items()}
        for group, squares in zip(self.job.groups, self._squared_norms(minimum).values(), strict=True):
            norm = squares.sqrt()
            factor = self._threshold(norm) / norm.clamp_min(torch.finfo(norm.dtype).tiny)
            for slot in group.gated_slots:
                if (u := minimum.get(slot.tensor)) is None:
                    continue
                along = torch.ones(u.shape[slot.dim], dtype=u.dtype, device=u.device)
                index = torch.as_tensor(slot.index, device=u.device)
                along[index] = factor.to(u)[:, None].expand(index.shape)
                u.mul_(along.view([-1 if d == slot.dim else 1 for d in range(u.ndim)]))
        return minimum

    def _squared_norms(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the squared norm of the tensors' entries that read each dimension, by group."""
        norms = {}
        for group in self.job.groups:
            total = next(iter(tensors.values())).new_zeros(group.width)
            for slot in group.gated_slots:
                if (u := tensors.get(slot.tensor)) is None:
                    continue
                squares = u.square().sum([d for d in range(u.ndim) if d != slot.dim]) if u.ndim > 1 else u.square()
                total = total + squares[torch.as_tensor(slot.index, device=u.device)].sum(1)
            norms[group.name] = total
        return norms

    def _penalty(self) -> Tensor:
        """Return gamma P(u)."""
        size = SPARSE_PENALTIES[self.config.penalty].size
        if self.config.groups == "weights":
            sums = [size(u).sum() for u in self.sparse_copies.values()]
        else:
            sums = [size(squares.sqrt()).sum() for squares in self._squared_norms(self.sparse_copies).values()]
        gamma: float = self.config.gamma
        return gamma * torch.stack(sums).sum()
