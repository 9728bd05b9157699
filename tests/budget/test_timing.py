"""Measured times: models run in turn, the ratio of two models and its interval."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import compress
from cases import Net
from compress.budget.latency import check_latency_reachable, choose_by_latency
from compress.budget.timing import (
    LatencyMeasurement,
    LatencyRatio,
    RunTimes,
    compare_latency,
    compare_latency_in_batches,
    latency_ratio,
    repeat_to_batch,
)
from compress.recipe import Budget, Target, Timing
from helpers.virtual_clock import VirtualClock
from helpers.widths import random_importance


def test_models_are_run_in_turn_after_a_warm_up() -> None:
    clock, order = VirtualClock(), []

    def named(name: str, seconds: Iterator[float]) -> nn.Module:
        def forward(self: Any, x: Tensor) -> Tensor:
            assert torch.is_inference_mode_enabled() and not any(m.training for m in self.modules())
            order.append(name)
            clock.passes(next(seconds))
            return x

        return Net(forward, norm=nn.BatchNorm1d(3))

    a, b = named("a", iter([9.0] * 3 + [0.001, 0.004, 0.002, 0.003])), named("b", iter([9.0] * 3 + [0.005] * 4))
    times = compare_latency([a, b], torch.randn(2, 3), 4, clock=clock)
    assert order == ["a", "b"] * 7
    assert times[0].samples == pytest.approx((1, 4, 2, 3)) and times[1].samples == pytest.approx((5,) * 4)
    assert times[0].median == pytest.approx(2.5) and times[0].spread == pytest.approx((3.25 - 1.75) / 2)
    assert times[1].spread == pytest.approx(0) and a.training and a.norm.training


def test_timing_leaves_buffers_caches_and_inputs_alone() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.seen += 1
        self.cache = x.sum()
        return x.mul_(2)

    model, x = Net(forward), torch.ones(2, 3)
    model.register_buffer("seen", torch.zeros(()))
    (times,) = compare_latency([model], x, 3)
    assert len(times.samples) == 3 and all(t > 0 for t in times.samples)
    assert float(model.seen) == 0 and not hasattr(model, "cache") and float(x.sum()) == 6


def test_inputs_of_all_forms_are_timed() -> None:
    x, add = torch.randn(2, 3), Net(lambda self, a, b=0: a + b)
    for inputs in (x, (x, x)):
        assert len(compare_latency([add], inputs, 2)[0].samples) == 2
    assert len(compare_latency([nn.Identity()], {"input": x}, 2)[0].samples) == 2
    assert len(compare_latency([Net(lambda self, images: images[0])], [x, x], 2)[0].samples) == 2
    with pytest.raises(TypeError, match="example_inputs: expected a tensor"):
        compare_latency([add], 3, 2)
    with pytest.raises(ValueError, match="repeats: expected at least 1; got 0"):
        compare_latency([add], x, 0)


def test_batch_is_the_first_example_repeated() -> None:
    x = torch.randn(3, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    batch = repeat_to_batch(x, 5)
    assert batch.shape == (5, 4, 5, 5) and all(torch.equal(row, x[0]) for row in batch)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    pair = repeat_to_batch((x, x[:, 0], 7), 2)
    assert [getattr(v, "shape", v) for v in pair] == [(2, 4, 5, 5), (2, 5, 5), 7]
    assert {k: tuple(v.shape) for k, v in repeat_to_batch({"image": x}, 1).items()} == {"image": (1, 4, 5, 5)}
    images = [torch.randn(3, 8, 8)]
    assert repeat_to_batch(images, 4) is images
    assert repeat_to_batch((x, x[:2]), 4)[0] is x  # which dimension is the batch is not plain
    with pytest.raises(TypeError, match="got int"):
        repeat_to_batch(3, 2)


def test_ratio_is_that_of_neighbouring_runs() -> None:
    """A machine that slows down tenfold half-way does not matter: both are slower."""
    drift = np.array([1.0] * 10 + [10.0] * 10)
    found = latency_ratio(RunTimes(tuple(2 * drift)), RunTimes(tuple(drift)))
    assert found == LatencyRatio(0.5, 0.5, 0.5, 20) and str(found) == "50% (50%..50%)"
    with pytest.raises(ValueError, match="ratio: expected as many runs of both; got 2 and 1"):
        latency_ratio(RunTimes((1.0, 1.0)), RunTimes((1.0,)))
    assert latency_ratio(RunTimes((0.0,)), RunTimes((0.0,))).value == 0


@pytest.mark.parametrize("pairs", [6, 8, 15, 30, 61, 120])
def test_interval_of_the_ratio_holds_it_in_95_of_100_cases(pairs: int) -> None:
    """Skewed noise with outliers, of which nothing is assumed but that pairs are alike and independent."""
    random, held, trials = np.random.default_rng(pairs), 0, 500
    noise = random.lognormal(0, 0.2, (trials, 2, pairs)) * (1 + 5 * (random.random((trials, 2, pairs)) < 0.05))
    for dense, candidate in noise:
        found = latency_ratio(RunTimes(tuple(dense)), RunTimes(tuple(0.6 * candidate)))
        assert found.low <= found.value <= found.high
        held += found.low <= 0.6 <= found.high
    assert held / trials >= 0.93


def test_interval_is_the_narrowest_pair_of_order_statistics_with_95_percent() -> None:
    """The table of the sign test: n, and the rank at which the interval of the median begins."""
    for pairs, rank_ in ((3, 1), (5, 1), (6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (30, 10), (50, 18)):
        found = latency_ratio(RunTimes((1.0,) * pairs), RunTimes(tuple(np.arange(1.0, pairs + 1))))
        assert (found.low, found.high) == (rank_, pairs + 1 - rank_), pairs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_work_on_a_gpu_is_waited_for() -> None:
    model, x = nn.Linear(4096, 4096).cuda(), torch.randn(4096, 4096, device="cuda")
    small = nn.Linear(4096, 8).cuda()
    assert latency_ratio(*compare_latency([model, small], x, 10)).value < 0.9


def test_batch_that_a_model_does_not_run_on_is_named() -> None:
    """It is named before a budget is searched for; where times are only reported, the inputs as they are will do."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).view(2, 4)

    model, x = Net(forward, first=nn.Linear(8, 12), last=nn.Linear(12, 4)), torch.randn(2, 8)
    groups = compress.find_groups(model, x)
    settings = (Target(), LatencyMeasurement(x, Timing(batch_size=3)))
    text = r"timing.batch_size: the model does not run on inputs of shape \[\[3, 8\]\]: RuntimeError: shape"
    with pytest.raises(ValueError, match=text):
        check_latency_reachable(model, groups, *settings, 0.5)
    with pytest.raises(ValueError, match=text):
        choose_by_latency(model, groups, random_importance(groups), Budget(latency=0.5), *settings)
    times, size = compare_latency_in_batches([model, model], x, Timing(batch_size=3, repeats=3))
    assert len(times) == 2 and size == "that of the example inputs"
    assert compare_latency_in_batches([model], x, Timing(batch_size=2, repeats=3))[1] == 2
