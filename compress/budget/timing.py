"""Measurement of latency: networks are run in turn, and pairs of neighboring runs are compared."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compress.modules import (
    as_call_inputs,
    clone_tensors,
    first_examples,
    guarded_parameters,
    has_written_parameters,
    module_mode,
    shared_copy,
)
from compress.recipe import Timing

Clock = Callable[[], float]
OnProgress = Callable[[str, int, int], None]  # text, measurements done, measurements in total

WARMUP_RUNS = 3  # of each network, not counted
MIN_PAIRS = 6  # with fewer pairs of runs no interval of the median has 95 %


class DoesNotRun(ValueError):
    """Raised when a model cannot be run on batches of the recipe's `timing.batch_size`."""


@dataclass(frozen=True)
class RunTimes:
    """Times of one network in milliseconds, in the order of its runs."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.samples))

    @property
    def spread(self) -> float:
        """Half of the interquartile range."""
        low, high = np.percentile(self.samples, [25, 75])
        return float(high - low) / 2


@dataclass(frozen=True)
class LatencyRatio:
    """Time of one network as a fraction of another's: median over pairs of runs, with its 95 % interval."""

    value: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{100 * self.value:.3g}% ({self.interval})"

    @property
    def interval(self) -> str:
        return f"{100 * self.low:.3g}%..{100 * self.high:.3g}%"


class InterleavedTimer:
    """Runs networks in turn and collects their times; can be run further.

    Raises:
        TypeError: `inputs` has none of the forms that a model can be called with.
        DoesNotRun: a model does not run on the inputs.
    """

    def __init__(self, models: Sequence[nn.Module], inputs: Any, clock: Clock) -> None:
        call = as_call_inputs(inputs)
        self.args, self.kwargs = clone_tensors(call)
        self.models, self.clock = list(models), clock
        tensors = [*pytree.tree_leaves(call), *(p for model in models for p in model.parameters())]
        self.devices = {t.device for t in tensors if isinstance(t, Tensor) and t.is_cuda}
        self.samples: list[list[float]] = [[] for _ in models]
        try:
            with guarded_parameters(*models):
                self.run(WARMUP_RUNS)
        except Exception as error:  # whatever the model's own code raises
            shapes = [list(t.shape) for t in pytree.tree_leaves(call) if isinstance(t, Tensor)]
            text = f"timing.batch_size: the model does not run on inputs of shape {shapes}: "
            raise DoesNotRun(f"{text}{type(error).__name__}: {str(error)[:160]}") from error
        self.models = [shared_copy(model) if has_written_parameters(model) else model for model in models]
        self.samples = [[] for _ in models]

    def run(self, repeats: int) -> None:
        """Run each network `repeats` times, in turn."""
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(module_mode(model, training=False))
            stack.enter_context(torch.inference_mode())
            for _ in range(repeats):
                for model, samples in zip(self.models, self.samples, strict=True):
                    samples.append(1e3 * self._seconds(model))

    def run_until_clear(self, repeats: int, min_pairs: int, is_clear: Callable[[LatencyRatio], bool]) -> LatencyRatio:
        """Run two networks until `is_clear(ratio)`, at most `4 * repeats` times; return the last ratio."""
        checkpoints = {max(MIN_PAIRS, min_pairs, math.ceil(repeats * fraction)) for fraction in (0.25, 0.5, 1, 2, 4)}
        for pairs in sorted(checkpoints):
            self.run(pairs - len(self.samples[0]))
            ratio = latency_ratio(*self.times)
            if is_clear(ratio):
                break
        return ratio

    @property
    def times(self) -> list[RunTimes]:
        """Times of each network so far."""
        return [RunTimes(tuple(samples)) for samples in self.samples]

    def _seconds(self, model: nn.Module) -> float:
        self._synchronize()
        start = self.clock()
        model(*self.args, **self.kwargs)
        self._synchronize()
        return self.clock() - start

    def _synchronize(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)


@dataclass
class LatencyMeasurement:
    """Settings of latency measurements.

    Attributes:
        example_inputs: inputs of the model; the first example is repeated to `timing.batch_size`.
        timing: batch size and repeats.
        reference: the dense network that times are relative to; by default the model that is measured.
        clock: returns seconds.
        on_progress: called after each measurement.
    """

    example_inputs: Any
    timing: Timing
    reference: nn.Module | None = None
    clock: Clock = field(default_factory=lambda: time.perf_counter)
    on_progress: OnProgress | None = None

    @cached_property
    def inputs(self) -> Any:
        """Example inputs in batches of the recipe's size."""
        return repeat_to_batch(self.example_inputs, self.timing.batch_size)

    def compare(
        self, dense: nn.Module, candidate: nn.Module, is_clear: Callable[[LatencyRatio], bool], min_pairs: int = 0
    ) -> LatencyRatio:
        """Time two networks in turn until `is_clear(ratio)`, at most four times `timing.repeats`."""
        timer = InterleavedTimer([dense, candidate], self.inputs, self.clock)
        return timer.run_until_clear(self.timing.repeats, min_pairs, is_clear)

    def milliseconds(self, model: nn.Module) -> float:
        """Return the median time of a network over `timing.repeats` runs."""
        timer = InterleavedTimer([shared_copy(model)], self.inputs, self.clock)
        timer.run(self.timing.repeats)
        return timer.times[0].median

    def report_progress(self, text: str, done: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(text, done, total)


def compare_latency(
    models: Sequence[nn.Module], inputs: Any, repeats: int, *, clock: Clock = time.perf_counter
) -> list[RunTimes]:
    """Time models in eval mode, one run of each in turn, without changing them.

    The runs are those of copies that share the parameters, so that caches and buffers which a model's code may fill
    stay as they are.

    Args:
        inputs: what the models are called with, in one of the forms of `find_groups`, on their device.

    Raises:
        TypeError: `inputs` has none of the forms that a model can be called with.
        DoesNotRun: a model does not run on the inputs.
        ValueError: `repeats` is less than one.
    """
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1; got {repeats}")
    timer = InterleavedTimer([shared_copy(model) for model in models], inputs, clock)
    timer.run(repeats)
    return timer.times


def compare_latency_in_batches(
    models: Sequence[nn.Module], example_inputs: Any, timing: Timing
) -> tuple[list[RunTimes], int | str]:
    """Time models on batches of the recipe's size; return the times and the batch size.

    If the models do not run on such batches, they are timed on the example inputs as they are.
    """
    try:
        batch = repeat_to_batch(example_inputs, timing.batch_size)
        return compare_latency(models, batch, timing.repeats), timing.batch_size
    except DoesNotRun:
        return compare_latency(models, example_inputs, timing.repeats), "that of the example inputs"


def latency_ratio(dense: RunTimes, candidate: RunTimes) -> LatencyRatio:
    """Return the candidate's time as a fraction of the dense network's, from pairs of neighboring runs.

    The interval lies between two order statistics of the ratios. They enclose the median with 95 % confidence for any
    distribution (binomial, p = 1/2). With fewer than six pairs the interval is the full range, with less confidence.

    >>> latency_ratio(RunTimes((2.0, 4.0, 2.0)), RunTimes((1.0, 1.0, 1.5)))
    LatencyRatio(value=0.5, low=0.25, high=0.75, pairs=3)

    Raises:
        ValueError: the networks were not run equally often.
    """
    pairs = len(dense.samples)
    if not pairs or pairs != len(candidate.samples):
        raise ValueError(f"latency_ratio: expected as many runs of both; got {pairs} and {len(candidate.samples)}")
    smallest = float(np.finfo(np.float64).tiny)  # a coarse clock may measure zero
    ratios = np.sort(np.array(candidate.samples) / np.maximum(dense.samples, smallest))
    tail = _tail_count(pairs)
    return LatencyRatio(float(np.median(ratios)), float(ratios[tail]), float(ratios[pairs - 1 - tail]), pairs)


def repeat_to_batch(example_inputs: Any, batch_size: int) -> Any:
    """Return the first example repeated `batch_size` times, or the inputs if their batch dimension is unknown.

    Raises:
        TypeError: `example_inputs` has none of the forms that a model can be called with.
    """
    call = as_call_inputs(example_inputs)
    first = first_examples(call)
    if first is call:
        return example_inputs
    args, kwargs = pytree.tree_map(lambda v: torch.cat([v] * batch_size) if isinstance(v, Tensor) else v, first)
    if isinstance(example_inputs, Mapping):
        return kwargs
    return args if isinstance(example_inputs, tuple) else args[0]


def _tail_count(pairs: int) -> int:
    """Return how many sorted values lie outside either end of the median's 95 % interval."""
    count, tail = 0, 0.5**pairs
    while 2 * (tail := tail + math.comb(pairs, count + 1) / 2**pairs) <= 0.05:
        count += 1
    return count
