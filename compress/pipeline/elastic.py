"""Elastic runs: a run that is resumed with another number of processes keeps the batches of a step where it can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compress.data import num_batches, shards_itself
from compress.distributed import world_size
from compress.errors import NotReady
from compress.training import LoopPosition


@dataclass(frozen=True)
class ProcessCount:
    """Processes of a run: with how many it was started and goes on, and the batches per step that its recipe sets.

    >>> ProcessCount(started=4, current=2, accumulate=1).batches_per_step
    2
    >>> ProcessCount(started=2, current=4, accumulate=2).batches_per_step
    1
    """

    started: int
    current: int
    accumulate: int  # batches per step and process, in a run that goes on as it was started

    @property
    def batches_per_step(self) -> int:
        """Return the batches that each process now accumulates per step, so that all read as many as before."""
        return max(1, round(self.started * self.accumulate / self.current))

    def message(self) -> str | None:
        """Return what changes, for the user; None if nothing does."""
        if self.started == self.current:
            return None
        before, after = self.started * self.accumulate, self.current * self.batches_per_step
        text = f"this run was started with {_count(self.started)} and continues with {_count(self.current)}: "
        if before == after:
            return text + (
                f"each process accumulates {self.batches_per_step} batches per step instead of {self.accumulate}, so "
                f"that a step reads the same {before} batches as before"
            )
        return text + (
            f"a step now reads {after} batches instead of {before}, since {before} cannot be divided by "
            f"{self.current}. The learning rate stays as the recipe says; the result differs from that of a run with "
            f"{_count(self.started)}"
        )

    def check_task(self, has_own_fine_tuning: bool) -> None:
        """Check that the fine-tuning of a task can go on with this number of processes.

        Raises:
            NotReady: it has a loop of its own.
        """
        if self.started != self.current and has_own_fine_tuning:
            raise NotReady(
                f"workdir: this run was started with {_count(self.started)}; its task fine-tunes in a loop of its own, "
                f"which cannot continue with {_count(self.current)}. Launch {_count(self.started)}"
            )

    def rescaled(self, position: LoopPosition, total: int) -> LoopPosition:
        """Return the position of a checkpoint in steps of the current size, in a training of `total` steps."""
        return position.rescaled(total, self.current * self.batches_per_step)


def total_batches(loader: Any) -> int | None:
    """Return the number of batches that all processes read from a loader together; None if unknown."""
    size = num_batches(loader)
    return size * world_size() if size is not None and shards_itself(loader) else size


def _count(processes: int) -> str:
    return f"{processes} process{'es' * (processes > 1)}"
