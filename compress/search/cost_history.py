"""Signed costs of scores during a search, as a report and a checkpoint hold them.

The cost of a dimension is alpha dL/dalpha; that of a group is the sum over its dimensions. Above zero, gradient descent
makes the scores smaller. What the classifier reads has the cost L - H, the loss minus the mean entropy of its output
(score_training/score_costs.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DEAD_ZONE = 0.01  # a smaller cost counts as zero, relative to what the group's dimensions sum to without their signs


@dataclass(frozen=True)
class LossAndEntropy:
    """Mean loss L and mean entropy H of some samples, and which share of all samples they are."""

    share: float
    loss: float
    entropy: float


@dataclass(frozen=True)
class CostSample:
    """Costs on one half of the data, as means over some steps."""

    costs: dict[str, float]
    pull: dict[str, float]
    candidates: dict[str, dict[str, float]]
    samples: dict[str, LossAndEntropy | None]


@dataclass
class Losses:
    """Loss, entropy and share of some samples at the recorded steps; None where there are no such samples."""

    share: list[float | None] = field(default_factory=list)
    loss: list[float | None] = field(default_factory=list)
    entropy: list[float | None] = field(default_factory=list)

    @property
    def difference(self) -> list[float | None]:
        """Return L - H, the cost of what the classifier reads, up to the bias of the classifier."""
        pairs = zip(self.loss, self.entropy, strict=True)
        return [None if loss is None or entropy is None else loss - entropy for loss, entropy in pairs]


@dataclass
class CostHistory:
    """Signed costs of the scores of one search on one half of the data.

    Attributes:
        stage: the search.
        half: `all`; or `auxiliary`, the half that the kept weights are trained on, and `primary`, the other one.
        steps: when they were recorded; each value is the mean over the steps since the record before.
        costs: signed cost of each group of dimensions, or group of choices.
        pull: sum of the costs above zero, of the group's dimensions or candidates; `costs - pull` are those below.
        candidates: of a group of choices, the cost of each candidate at full weight.
        samples: loss and entropy of `all`, `right` and `wrong` predictions, if the task can tell.
    """

    stage: str
    half: str
    steps: list[int] = field(default_factory=list)
    costs: dict[str, list[float]] = field(default_factory=dict)
    pull: dict[str, list[float]] = field(default_factory=dict)
    candidates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    samples: dict[str, Losses] = field(default_factory=dict)

    def append(self, step: int, sample: CostSample) -> None:
        """Add the costs of the steps up to this one."""
        self.steps.append(step)
        for own, values in ((self.costs, sample.costs), (self.pull, sample.pull)):
            for name, value in values.items():
                own.setdefault(name, []).append(_short(value))
        for name, table in sample.candidates.items():
            for candidate, value in table.items():
                self.candidates.setdefault(name, {}).setdefault(candidate, []).append(_short(value))
        for name in dict.fromkeys([*self.samples, *sample.samples]):
            if name not in self.samples:
                before = len(self.steps) - 1
                self.samples[name] = Losses([None] * before, [None] * before, [None] * before)
            measured = sample.samples.get(name)
            for key, series in vars(self.samples[name]).items():
                series.append(None if measured is None else _short(getattr(measured, key)))

    @property
    def total(self) -> list[float]:
        """Return the sum of the costs of all groups."""
        return [sum(values) for values in zip(*self.costs.values(), strict=True)]

    @property
    def last_group(self) -> str | None:
        """Return the last group whose cost is not always zero; None if there is none.

        Groups whose readers are followed by a norm have none: the norm undoes a common factor of all their dimensions.
        """
        return next((name for name in reversed(self.costs) if any(self.signs(name))), None)

    def signs(self, name: str) -> list[int]:
        """Return the sign of a group's smoothed cost at each recorded step; 0 where its dimensions cancel to 1 %."""
        sizes = [2 * pull - cost for cost, pull in zip(self.costs[name], self.pull[name], strict=True)]
        zero = DEAD_ZONE * max(sizes, default=0.0)
        return [0 if abs(cost) <= zero else 1 if cost > 0 else -1 for cost in smoothed(self.costs[name])]

    def sign_changes(self, name: str) -> list[int]:
        """Return the steps at which a group's smoothed cost has changed its sign; zeros do not count."""
        return sign_changes(self.steps, self.signs(name))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data, without copying the lists."""
        return vars(self) | {"samples": {name: vars(losses) for name, losses in self.samples.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostHistory:
        """Read what `to_dict` returned, without copying the lists."""
        return cls(**{**data, "samples": {name: Losses(**losses) for name, losses in data["samples"].items()}})


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the means over about a tenth of all values around each, because the cost of a single batch is noisy."""
    reach = len(values) // 20
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def sign_changes(steps: Sequence[int], signs: Sequence[int]) -> list[int]:
    """Return the steps at which the sign is another one than before; zeros do not count."""
    known = [(step, sign) for step, sign in zip(steps, signs, strict=True) if sign]
    return [step for (_, before), (step, sign) in itertools.pairwise(known) if sign != before]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
