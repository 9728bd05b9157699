"""Signed costs of scores, summed on the device from the gradients that the steps of a search compute anyway.

Xie et al., Understanding the wiring evolution in differentiable neural architecture search, AISTATS 2021. With L the
mean loss of a batch, the cost of a dimension u, and of a candidate k in a choice y = sum_k p_k O_k(x), is

    alpha_u dL/dalpha_u          C_k = dL/dp_k = sum over samples, channels and places of dL/dy * O_k(x)

The cost of a group is the sum over its dimensions, that of a choice sum_k p_k C_k. A step of gradient descent makes a
score smaller if its cost is above zero, and the weight of a candidate if its cost is above that of its choice.

Theorem 1: a common factor of everything that a norm in training mode reads has no cost, up to the norm's eps. So the
costs of a group's dimensions add up to zero if all its readers are followed by such norms.

Theorem 2: the cost of everything that the classifier reads is L - H - b^T mean(p - y), with H the mean entropy of its
softmax p, y the targets and b its bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.budget import Operations
from compress.training import Task

from ..cost_history import CostSample, LossAndEntropy
from .regularizer import ScorePositions

SAMPLES = "samples"  # name of what the passes measure


class HalfSums:
    """Sums over the steps on one half of the data."""

    def __init__(self, tensors: Sequence[Tensor], operations: bool) -> None:
        def zeros() -> list[Tensor]:
            return [torch.zeros_like(t, requires_grad=False) for t in tensors]

        self.weighted = zeros()  # score times gradient; of a candidate: p_k C_k
        self.plain = zeros() if operations else []  # C_k
        self.steps = tensors[0].detach().new_zeros(())
        self.samples = tensors[0].detach().new_zeros(3, 2)  # (count, loss, entropy) of (right, wrong) predictions

    def tensors(self) -> list[Tensor]:
        """Return all sums."""
        return [*self.weighted, *self.plain, self.steps, self.samples]


class ScoreCosts:
    """Sums of the signed costs of all scores since they were last read, for each half of the data.

    Attributes:
        tensors: what to differentiate the loss in: the scores, or offsets of zero on the weights of every choice.
    """

    def __init__(self, positions: ScorePositions, operations: Operations | None, halves: Sequence[str]) -> None:
        self.positions, self.operations = positions, operations
        scores = {id(a): a for parts in positions.values() for a, _ in parts}
        self.tensors: list[nn.Parameter] = list(scores.values())
        if operations is not None:
            self.tensors = [choice.attach_offsets_() for copies in operations.groups.values() for choice in copies]
        self.sums = {half: HalfSums(self.tensors, operations is not None) for half in halves}

    def missing_from(self, tensors: Sequence[Tensor]) -> list[nn.Parameter]:
        """Return the tensors that have to be differentiated beside these."""
        known = set(map(id, tensors))
        return [t for t in self.tensors if id(t) not in known]

    @torch.no_grad()
    def add_(self, half: str, gradients: list[Tensor], factor: float, samples: Tensor | None) -> None:
        """Add the costs of a step.

        Args:
            gradients: `factor` times the gradient in `tensors`.
            samples: what `sum_samples` returned, summed over all samples; None if the task cannot tell.
        """
        sums = self.sums[half]
        scores: list[Tensor] = [*self.tensors]
        if self.operations is not None:
            scores = self._candidate_weights(self.operations)
            torch._foreach_add_(sums.plain, gradients, alpha=1 / factor)
        torch._foreach_addcmul_(sums.weighted, scores, gradients, value=1 / factor)
        sums.steps.add_(1)
        if samples is not None:
            sums.samples.add_(samples)

    def read_(self) -> dict[str, CostSample]:
        """Return the means over the steps since the last call, for each half that had any, and forget them."""
        read = {half: self._read_half_(sums) for half, sums in self.sums.items()}
        return {half: sample for half, sample in read.items() if sample is not None}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a resumed search needs."""
        return {f"cost {half} {i}": t for half, sums in self.sums.items() for i, t in enumerate(sums.tensors())}

    def _candidate_weights(self, operations: Operations) -> list[Tensor]:
        """Return the weights of the candidates of each choice; those of a group share them, unless they are free."""
        weights = []
        for first, *others in operations.groups.values():
            weights.append(first.weights)
            weights += [first.weights if choice.free_weights is None else choice.weights for choice in others]
        return weights

    def _read_half_(self, sums: HalfSums) -> CostSample | None:
        tensors = sums.tensors()
        flat = torch.cat([t.flatten() for t in tensors]).cpu()  # waits for the device once
        for tensor in tensors:
            tensor.zero_()
        parts = torch.split(flat, [t.numel() for t in tensors])
        values = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
        *products, steps, samples = values
        if not steps:
            return None
        means = [value.double() / steps.double() for value in products]
        by_score, candidates = self._sum_by_group(means)
        return CostSample(
            {name: float(value.sum()) for name, value in by_score.items()},
            {name: float(value.clamp_min(0).sum()) for name, value in by_score.items()},
            candidates,
            _losses(samples.double()) if samples.any() else {},
        )

    def _sum_by_group(self, means: Sequence[Tensor]) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
        """Return the cost of each dimension or weighted candidate by group, and of each candidate at full weight."""
        if self.operations is None:
            mean_of = {id(t): mean for t, mean in zip(self.tensors, means, strict=True)}
            parts = {
                name: torch.cat([mean_of[id(a)][index.cpu()] for a, index in positions], 1).sum(1)
                for name, positions in self.positions.items()
            }
            return parts, {}
        weighted, plain, start = {}, {}, 0
        for name, copies in self.operations.groups.items():
            end, places = start + len(copies), len(self.tensors)
            weighted[name] = torch.stack([*means[start:end]]).sum(0)
            full = torch.stack([*means[places + start : places + end]]).sum(0)
            plain[name] = dict(zip(copies[0].names, full.tolist(), strict=True))
            start = end
        return weighted, plain


def sum_samples(task: Task, outputs: Any, batch: Any) -> Tensor | None:
    """Return count, loss and entropy, summed over right and over wrong predictions, as a (3, 2) tensor."""
    with torch.no_grad():
        measured = task.sample_losses(outputs, batch)
        if measured is None:
            return None
        loss, entropy, right, counted = measured
        rows = torch.stack([torch.ones_like(loss), loss, entropy])
        columns = torch.stack([right & counted, ~right & counted])
        return torch.where(columns, rows[:, None], 0).sum(-1)


def _losses(samples: Tensor) -> dict[str, LossAndEntropy | None]:
    """Return the mean loss and entropy of all, right and wrong predictions."""
    columns = {"all": samples.sum(1), "right": samples[:, 0], "wrong": samples[:, 1]}
    total = float(columns["all"][0])

    def mean(column: Tensor) -> LossAndEntropy | None:
        count, loss, entropy = column.tolist()
        return LossAndEntropy(count / total, loss / count, entropy / count) if count else None

    return {name: mean(column) for name, column in columns.items()}
