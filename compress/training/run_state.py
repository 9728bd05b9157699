"""State of a run and of its training loop, as checkpoints store them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from compress.data import BatchPosition
from compress.storage import RandomState

Stage = Literal["operations", "search", "cut", "finetune"]

# Field of `RunState` -> key in a checkpoint.
_KEYS = {
    "origin": "origin",
    "run_digest": "run",
    "dense_metrics": "dense",
    "stage": "stage",
    "scores": "scores",
    "costs": "costs",
    "dense_costs": "whole",
    "round": "round",
    "plan": "plan",
    "report": "report",
    "sliced_metrics": "sliced",
    "kept_step": "kept",
}


@dataclass
class RunState:
    """Results of a run so far; None where they are not known yet."""

    origin: dict[str, Any] | None = None  # versions, commit and seed, as the report shows them
    run_digest: str | None = None  # hash of run.json: ties a checkpoint to its working directory
    stage: Stage | None = None
    dense_metrics: dict[str, float] | None = None
    sliced_metrics: dict[str, float] | None = None  # right after the cut
    scores: list[dict[str, Any]] | None = None  # score history of the search
    costs: list[dict[str, Any]] | None = None  # CostHistory.to_dict() of each search and half of the data
    dense_costs: dict[str, float] | None = None  # by the units of the budget
    round: int | None = None  # rounds of search and cut that are finished
    plan: dict[str, Any] | None = None  # Plan.to_dict()
    report: dict[str, Any] | None = None  # fields of the Report
    kept_step: dict[str, int] | None = None  # {"step": 40, "of": 100}: where the best weights come from

    def score_history(self) -> list[dict[str, Any]]:
        """Return the list that the search appends its scores to."""
        if self.scores is None:
            self.scores = []
        return self.scores

    def cost_history(self) -> list[dict[str, Any]]:
        """Return the list that the search appends the costs of its scores to."""
        if self.costs is None:
            self.costs = []
        return self.costs

    def to_dict(self) -> dict[str, Any]:
        """Return the known values under the keys of a checkpoint."""
        values = {key: getattr(self, name) for name, key in _KEYS.items()}
        return {key: value for key, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunState:
        """Read the values of a checkpoint; ignore keys that belong to the training loop."""
        return cls(**{name: values[key] for name, key in _KEYS.items() if key in values})


@dataclass(frozen=True)
class LoopPosition:
    """Position at which a training loop stopped."""

    done: int  # steps
    batches: BatchPosition
    sums: dict[str, float]  # of loss terms since the last record in the history
    count: int  # of steps in `sums`
    random_states: list[RandomState]  # one per process
    total: int  # steps of the training
    batches_per_step: int  # that all processes read together

    def rescaled(self, total: int, batches_per_step: int) -> LoopPosition:
        """Return the position after the same data in a training whose steps read another number of batches.

        If they do not divide, the batches of a begun step are read again.
        """
        epoch, steps_read, fraction = self.batches
        batches = BatchPosition(epoch, steps_read * self.batches_per_step // batches_per_step, fraction)
        done = self.done if total == self.total else min(total, self.done * total // self.total)
        return replace(self, done=done, batches=batches, total=total, batches_per_step=batches_per_step)

    def to_dict(self) -> dict[str, Any]:
        """Return the position under the keys of a checkpoint."""
        loop = {"done": self.done, "sums": self.sums, "count": self.count, "random": self.random_states}
        return loop | {"total": self.total, "per_step": self.batches_per_step} | self.batches.to_dict()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoopPosition:
        """Read the position from the values of a checkpoint."""
        batches = BatchPosition.from_dict(values)
        loop = (values["done"], batches, values["sums"], values["count"], values["random"])
        return cls(*loop, values["total"], values["per_step"])


@dataclass
class CheckpointMetadata:
    """Everything in a checkpoint beside its tensors; `position` is None between two stages."""

    run_state: RunState
    history: list[dict[str, Any]]
    seconds: dict[str, float]
    training: dict[str, Any] = field(default_factory=dict)  # values of the stage's TrainingState
    gradients: dict[str, float] = field(default_factory=dict)  # state of the GradientComputer
    position: LoopPosition | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data, all keys at one level."""
        position = self.position.to_dict() if self.position is not None else {}
        loop = {"history": self.history, "seconds": self.seconds, "state": self.training, "compute": self.gradients}
        return self.run_state.to_dict() | position | loop

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CheckpointMetadata:
        """Read what `to_dict` returned.

        Raises:
            KeyError: a key is missing.
        """
        position = LoopPosition.from_dict(values) if "done" in values else None
        run_state, loop = RunState.from_dict(values), (values["history"], values["seconds"])
        return cls(run_state, *loop, values["state"], values["compute"], position)


class ResumePoint(NamedTuple):
    """The checkpoint that a run continues from."""

    tensors: dict[str, Tensor]
    metadata: CheckpointMetadata
