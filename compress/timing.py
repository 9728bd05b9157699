"""How long networks take, measured in turn; and the widths that meet a budget of latency."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .budget import Bounds, BudgetError, Importance, Int, Ladder, percent
from .discover import _first, as_call
from .groups import Groups
from .plan import Plan
from .recipe import Budget, Target, Timing
from .search import Ranking
from .shell import shell
from .slicing import slice_
from .tracing import mode

Clock = Callable[[], float]
Tell = Callable[[str, int, int], None]

WARMUP = 3  # runs of each network that do not count
HALVINGS = 8  # of the ranking: the widths are then known to a 256th of all dimensions
FEWEST = 6  # pairs below which no interval of the median has 95 %


class DoesNotRun(ValueError):
    """A model cannot be timed on batches of the size that the recipe says."""


@dataclass(frozen=True)
class Times:
    """One network's times in milliseconds, in the order of its runs."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.samples))

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles."""
        low, high = np.percentile(self.samples, [25, 75])
        return float(high - low) / 2


@dataclass(frozen=True)
class Ratio:
    """One network's time as a part of another's: the median over pairs of runs, and that median's 95 % interval."""

    value: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{100 * self.value:.3g}% ({self.interval})"

    @property
    def interval(self) -> str:
        return f"{100 * self.low:.3g}%..{100 * self.high:.3g}%"


def compare(models: Sequence[nn.Module], inputs: Any, repeats: int, *, clock: Clock = time.perf_counter) -> list[Times]:
    """Time models in eval mode, one run of each in turn; the models themselves are not changed.

    `inputs` is what the models are called with, in the forms of `find_groups`, on their device. Runs are those of
    copies that share the parameters, so that caches and buffers which a model's code may fill stay as they are.

    Raises:
        TypeError: `inputs` is none of the forms that a model can be called with.
        DoesNotRun: a model does not run on them.
        ValueError: `repeats` is less than one.
    """
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1; got {repeats}")
    race = _Race([shell(model) for model in models], inputs, clock)
    race.run(repeats)
    return race.times


def ratio(dense: Times, candidate: Times) -> Ratio:
    """The candidate's time as a part of the dense network's, from runs that were neighbours.

    The interval lies between two order statistics of the pairs' ratios, which hold the median with 95 % whatever the
    distribution (binomial, p = 1/2); fewer than six pairs give all of their range, and less than 95 %.

    >>> ratio(Times((2.0, 4.0, 2.0)), Times((1.0, 1.0, 1.5)))
    Ratio(value=0.5, low=0.25, high=0.75, pairs=3)

    Raises:
        ValueError: the networks were not run in turn, equally often.
    """
    pairs = len(dense.samples)
    if not pairs or pairs != len(candidate.samples):
        raise ValueError(f"ratio: expected as many runs of both; got {pairs} and {len(candidate.samples)}")
    least = float(np.finfo(np.float64).tiny)  # a coarse clock may see no time pass
    parts = np.sort(np.array(candidate.samples) / np.maximum(dense.samples, least))
    beyond = _beyond(pairs)
    return Ratio(float(np.median(parts)), float(parts[beyond]), float(parts[pairs - 1 - beyond]), pairs)


def batched(example_inputs: Any, batch_size: int) -> Any:
    """The first example so many times, where it is plain which dimension is the batch; else the inputs as they are.

    Raises:
        TypeError: `example_inputs` is none of the forms that a model can be called with.
    """
    call = as_call(example_inputs)
    first = _first(call)
    if first is call:
        return example_inputs
    args, kwargs = pytree.tree_map(lambda v: torch.cat([v] * batch_size) if isinstance(v, Tensor) else v, first)
    if isinstance(example_inputs, Mapping):
        return kwargs
    return args if isinstance(example_inputs, tuple) else args[0]


def compare_batches(models: Sequence[nn.Module], example_inputs: Any, timing: Timing) -> tuple[list[Times], int | str]:
    """Time models on batches of the size that is asked for, or as the inputs are if they run on no such; says which."""
    try:
        return compare(models, batched(example_inputs, timing.batch_size), timing.repeats), timing.batch_size
    except DoesNotRun:
        return compare(models, example_inputs, timing.repeats), "that of the example inputs"


def choose_by_latency(
    model: nn.Module,
    groups: Groups,
    importance: Importance,
    budget: Budget,
    target: Target,
    timing: Timing,
    example_inputs: Any,
    *,
    ranking: Ranking = "global",
    dense: Mapping[str, int] | None = None,
    reference: nn.Module | None = None,
    left: float | None = None,
    tell: Tell | None = None,
    clock: Clock = time.perf_counter,
) -> tuple[dict[str, Int], list[str]]:
    """Keep the most important dimensions that run within the budget, as measured; with what is to be noted about it.

    The number of dimensions is found by bisection on the ranking: each candidate is cut out and timed in turn with the
    dense network, for as long as it takes to tell on which side of the budget it lies, `4 * timing.repeats` pairs at
    the most. The widest that met the budget is measured once more; if it fails then, so are narrower ones. Dimensions
    of no importance are not kept for the sake of a budget that has room for them.

    Where `model` is already cut, `reference` is the dense network that the budget refers to (default: `model`), `dense`
    has its widths, and `left` is this round's part of its time (default: the budget's).

    Raises:
        BudgetError: the budget is out of reach, or the noise is too large to tell.
        ValueError: the budget is not one of latency, or importance or `target.bounds` are wrong, as in `choose`.
        TypeError: `example_inputs` is none of the forms that a model can be called with.
    """
    if budget.unit != "latency":
        raise ValueError(f"choose_by_latency: expected a budget of latency; got {budget.unit}")
    left = budget.left if left is None else left
    bounds = Bounds.of(groups, target, dense)
    bounds = replace(bounds, full=bounds.alive(groups, importance))
    ladder = Ladder.of(groups, importance, bounds, ranking, budget.unit)
    if left >= 1:
        return ladder.keep(bounds.full), []
    inputs = batched(example_inputs, timing.batch_size)
    reference = model if reference is None else reference
    whole = reference is model and bool((bounds.full == groups.cost.widths).all())
    trial = _Trial(model, shell(reference), groups, ladder, inputs, left, timing.repeats, clock, tell, whole)
    trial.tell_apart()
    widths, found = trial.confirmed(trial.widest())
    within = f"latency {found}: the budget of {percent(left)} lies within the noise"
    return ladder.keep(widths), [within] if found.high > left else []


def shares(
    model: nn.Module,
    groups: Groups,
    example_inputs: Any,
    timing: Timing,
    *,
    tell: Tell | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """The part of the network's time that one dimension of each group takes, as measured.

    Each group is cut to a half and timed in turn with the dense network, until it is clear that it takes less, four
    times `timing.repeats` at the most: the median over pairs of runs of the time that is gone, for each dimension that
    is. Where it does not become clear, the dimension's part of the multiply-adds stands in.
    """
    inputs, found, cost = batched(example_inputs, timing.batch_size), {}, groups.cost
    everything = {g.name: np.arange(g.width) for g in groups}
    for done, group in enumerate(groups, 1):
        each = max(1, group.width // group.ways // 2)
        kept = group.ways * each
        widths = np.where(np.array(cost.names) == group.name, kept, cost.widths)
        gone = 1 - int(cost.macs(widths)) / max(1, int(cost.macs(cost.widths)))
        if kept < group.width:
            small = slice_(shell(model), Plan.build(model, groups, everything | {group.name: group.per_way(each)}))
            measured = _until(_Race([shell(model), small], inputs, clock), timing.repeats, 0, lambda r: r.high < 1)
            gone = 1 - measured.value if measured.high < 1 else gone
        found[group.name] = gone / max(1, group.width - kept)
        if tell:
            tell(f"timing {group.name}", done, len(groups))
    return found


def check_reach(
    model: nn.Module, groups: Groups, budget: Budget, target: Target, timing: Timing, example_inputs: Any
) -> None:
    """Time the narrowest network that the target allows.

    Raises:
        BudgetError: the budget of latency is out of reach, or the noise is too large to tell.
    """
    if budget.left >= 1 or not len(groups):
        return
    equal = {g.name: np.ones(g.width) for g in groups}
    ladder = Ladder.of(groups, equal, Bounds.of(groups, target), "global", budget.unit)
    inputs = batched(example_inputs, timing.batch_size)
    clock = time.perf_counter
    trial = _Trial(model, shell(model), groups, ladder, inputs, budget.left, timing.repeats, clock, None, True)
    trial.tell_apart()
    if not trial.passes(0):
        raise BudgetError(trial.out_of_reach(*trial.known.values()))


class _Race:
    """Networks that are run in turn, for as long as one likes."""

    def __init__(self, models: Sequence[nn.Module], inputs: Any, clock: Clock) -> None:
        call = as_call(inputs)
        self.args, self.kwargs = pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, call)
        self.models, self.clock = models, clock
        tensors = [*pytree.tree_leaves(call), *(p for model in models for p in model.parameters())]
        self.devices = {t.device for t in tensors if isinstance(t, Tensor) and t.is_cuda}
        self.samples: list[list[float]] = [[] for _ in models]
        try:
            self.run(WARMUP)
        except Exception as error:  # of the model's own code
            shapes = [list(t.shape) for t in pytree.tree_leaves(call) if isinstance(t, Tensor)]
            text = f"timing.batch_size: the model does not run on inputs of shape {shapes}: "
            raise DoesNotRun(f"{text}{type(error).__name__}: {str(error)[:160]}") from error
        self.samples = [[] for _ in models]

    def run(self, repeats: int) -> None:
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(mode(model, training=False))
            stack.enter_context(torch.inference_mode())
            for _ in range(repeats):
                for model, samples in zip(self.models, self.samples, strict=True):
                    samples.append(1e3 * self._seconds(model))

    def _seconds(self, model: nn.Module) -> float:
        self._wait()
        start = self.clock()
        model(*self.args, **self.kwargs)
        self._wait()
        return self.clock() - start

    def _wait(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)

    @property
    def times(self) -> list[Times]:
        return [Times(tuple(samples)) for samples in self.samples]


def _until(race: _Race, repeats: int, fewest: int, clear: Callable[[Ratio], bool]) -> Ratio:
    """Run two networks in turn until it is clear, four times `repeats` at the most."""
    looks = {max(FEWEST, fewest, math.ceil(repeats * part)) for part in (0.25, 0.5, 1, 2, 4)}
    for look in sorted(looks):
        race.run(look - len(race.samples[0]))
        found = ratio(*race.times)
        if clear(found):
            break
    return found


@dataclass
class _Trial:
    """Candidates on a ladder, each timed in turn with the dense network."""

    model: nn.Module
    dense: nn.Module  # a shell, to be run
    groups: Groups
    ladder: Ladder
    inputs: Any
    left: float
    repeats: int
    clock: Clock
    tell: Tell | None
    whole: bool  # whether the top of the ladder is the dense network itself
    known: dict[tuple[int, ...], Ratio] = field(default_factory=dict)
    done: int = 0

    def tell_apart(self) -> None:
        """Time the dense network against itself.

        Raises:
            BudgetError: the budget lies within the noise.
        """
        noise = self._against(shell(self.dense), 0, lambda r: r.high - r.low <= 1 - self.left)
        self._told(f"the dense network against itself: {noise}")
        if noise.high - noise.low > 1 - self.left:
            raise BudgetError(
                f"budget.latency: {percent(self.left)} cannot be told from 100% here: the same network against itself "
                f"measures {noise.interval} ({noise.pairs} repeats). "
                "Raise timing.repeats or timing.batch_size, quieten the machine, or ask for less."
            )

    def widest(self) -> int:
        """The highest rung that was measured within the budget.

        Raises:
            BudgetError: not even the narrowest network is.
        """
        low, high = 0, self.ladder.top
        if not self.passes(low):
            raise BudgetError(self.out_of_reach(*self.known.values()))
        if not self.whole and self.passes(high):
            return high
        high, most = high - 1, len(self.known) + HALVINGS
        while low < high and len(self.known) < most:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.passes(middle) else (low, middle - 1)
        return low

    def confirmed(self, rung: int) -> tuple[Int, Ratio]:
        """The widths of this rung or, if they fail when measured once more, of one below, by growing steps.

        Raises:
            BudgetError: none is within the budget at second sight.
        """
        again: dict[tuple[int, ...], Ratio] = {}
        for step in range(self.ladder.top.bit_length() + 1):
            widths = self.ladder.widths(rung)
            if tuple(widths) not in again:
                found = again[tuple(widths)] = self._measured(widths, self.repeats)
                self._told(f"latency {found} at second sight", last=found.value <= self.left)
                if found.value <= self.left:
                    return widths, found
            rung = max(0, rung - (max(1, self.ladder.top >> HALVINGS) << step))
        raise BudgetError(self.out_of_reach(*again.values()))

    def passes(self, rung: int) -> bool:
        widths = self.ladder.widths(rung)
        key = tuple(widths)
        if key not in self.known:
            self.known[key] = self._measured(widths, 0)
            self._told(f"latency {self.known[key]} with {sum(key)} of {sum(self.groups.cost.widths)} dimensions")
        return self.known[key].value <= self.left

    def _measured(self, widths: Int, fewest: int) -> Ratio:
        plan = Plan.build(self.model, self.groups, self.ladder.keep(widths))
        candidate = slice_(shell(self.model), plan)
        return self._against(candidate, fewest, lambda r: not r.low <= self.left <= r.high)

    def _against(self, candidate: nn.Module, fewest: int, clear: Callable[[Ratio], bool]) -> Ratio:
        """Run the dense network and a candidate in turn until it is clear, four times `repeats` at the most."""
        return _until(_Race([self.dense, candidate], self.inputs, self.clock), self.repeats, fewest, clear)

    def out_of_reach(self, *measured: Ratio) -> str:
        best = min(measured, key=lambda found: found.value)
        return (
            f"budget.latency: {percent(self.left)} of the dense network's time cannot be reached; the smallest "
            f"measured is {best}, {len(self.groups)} groups offered, {len(self.groups.refused)} refused. "
            f"{self.groups.held_back()}Raise the budget, allow more in target, or lower its min_keep, round_to, bounds."
        )

    def _total(self) -> int:
        """How many measurements there are at the most, if the first to be confirmed is."""
        return 3 + (not self.whole) + min(HALVINGS, math.ceil(math.log2(self.ladder.top + 1)))

    def _told(self, text: str, *, last: bool = False) -> None:
        total = self._total()
        self.done = total if last else min(self.done + 1, total - 1)
        if self.tell:
            self.tell(text, self.done, total)


def _beyond(pairs: int) -> int:
    """How many of the sorted values lie beyond either end of the median's 95 % interval."""
    count, tail = 0, 0.5**pairs
    while 2 * (tail := tail + math.comb(pairs, count + 1) / 2**pairs) <= 0.05:
        count += 1
    return count
