"""Outer iterations of the Bayesian searches: when to sample the curvature, and when to update the priors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..base import Job

SAMPLING_FRACTION = 0.25  # part of an outer iteration, at its end, in which the curvature is sampled
SAMPLE_FRACTION = 0.05  # part of the samples of an outer iteration that the curvature is computed on
MIN_SAMPLES = 128  # of an outer iteration for the curvature


@dataclass(frozen=True)
class OuterIterations:
    """Schedule of the outer iterations of a search.

    Attributes:
        count: number of outer iterations; by default one per epoch.
        period: steps of an outer iteration.
        sampling_steps: steps at the end of an outer iteration in which the curvature is sampled.
        steps: steps of the search.
    """

    count: int
    period: int
    sampling_steps: int
    steps: int

    @classmethod
    def of(cls, job: Job, iterations: int | None) -> OuterIterations:
        """Return the schedule for `iterations` outer iterations, or one per epoch if None."""
        epochs = max(1, round(job.steps / job.steps_per_epoch)) if job.steps_per_epoch else 1
        count = iterations or epochs
        period = math.ceil(job.steps / count)
        return cls(count, period, max(1, round(SAMPLING_FRACTION * period)), job.steps)

    def is_sampling_step(self, done: int) -> bool:
        """Return whether the curvature is sampled in step `done`, counted from one."""
        return self._position(done) > self.period - self.sampling_steps or done == self.steps

    def is_last_step(self, done: int) -> bool:
        """Return whether step `done`, counted from one, ends an outer iteration."""
        return self._position(done) == self.period or done == self.steps

    def _position(self, done: int) -> int:
        return (done - 1) % self.period + 1
