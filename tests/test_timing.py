"""A budget of latency is met as measured, or it is said why that cannot be known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from case import Net, groups_of, same_bits
from test_budget import random_importance, widths
from torch import Tensor, nn

import compress
from compress import BudgetError
from compress.budget import choose, rank, smallest
from compress.recipe import Bound, Budget, Target, Timing
from compress.timing import (
    HALVINGS,
    Ratio,
    Times,
    batched,
    check_reach,
    choose_by_latency,
    compare,
    compare_batches,
    ratio,
)

TAKES = 20e-6  # seconds for each dimension, on the clock below


class Clock:
    """Time that passes only where a network says so, with noise if wanted."""

    def __init__(self, noise: float = 0.0, seed: int = 0) -> None:
        self.now, self.runs, self.noise, self.seed = 0.0, 0, noise, seed
        self.start()

    def start(self) -> None:
        """Draw noise anew: runs before the first that is timed are none of this clock's business."""
        self.random = np.random.default_rng(self.seed)

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.runs += 1
        self.now += seconds * float(np.exp(self.noise * self.random.standard_normal()))


def network(clock: Clock, widths: tuple[int, int] = (40, 24), idle: float = 0.0) -> nn.Module:
    """A network that takes time in proportion to its widths, and `idle` seconds besides."""

    def forward(self: Any, x: Tensor) -> Tensor:
        clock.passes(idle + TAKES * (len(self.first.weight) + len(self.second.weight)))
        return self.last(self.second(self.first(x).relu()).relu())

    torch.manual_seed(0)
    a, b = widths
    return Net(forward, first=nn.Linear(8, a), second=nn.Linear(a, b), last=nn.Linear(b, 4))


def pruned(
    clock: Clock, part: float, model: nn.Module | None = None, target: Target | None = None, **more: Any
) -> tuple[np.ndarray, list[str]]:
    """The widths that a budget of latency leaves, and the notes."""
    model, timing, x = model or network(clock), Timing(repeats=more.pop("repeats", 10)), torch.randn(2, 8)
    groups = compress.find_groups(model, x)
    clock.start()
    args = (model, groups, random_importance(groups), Budget(latency=part), target or Target(), timing, x)
    keep, notes = choose_by_latency(*args, clock=clock, **more)
    return widths(groups, keep), notes


@pytest.mark.parametrize("left", [0.1, 0.33, 0.51, 0.76, 0.9])
def test_budget_of_latency_is_met_and_tight(left: float) -> None:
    """Without noise the time is known: so many dimensions fit, and all of them are found."""
    kept, notes = pruned(Clock(), left)
    assert kept.sum() == int(64 * left) and notes == []


@pytest.mark.parametrize("ranking", ["global", "group", "cost"])
def test_choice_by_latency_follows_the_ranking(ranking: Any) -> None:
    """Where time is in proportion to dimensions, a budget of dimensions with the same ranking agrees."""
    clock = Clock()
    model = network(clock)
    groups, target = compress.find_groups(model, torch.randn(2, 8)), Target(min_keep=1)
    importance, x = random_importance(groups), torch.randn(2, 8)
    args = (model, groups, importance, Budget(latency=0.51), target, Timing(), x)
    found, _ = choose_by_latency(*args, ranking=ranking, clock=clock)
    ranked = rank(groups, importance, ranking, "latency")
    expected = choose(groups, ranked, Budget(dims=0.51), target)
    assert {n: k.tolist() for n, k in found.items()} == {n: k.tolist() for n, k in expected.items()}


def test_model_is_untouched_by_the_choice() -> None:
    clock = Clock()
    model = nn.Sequential(nn.BatchNorm1d(8), network(clock)).train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters, flags = dict(model.named_parameters()), [m.training for m in model.modules()]
    kept, _ = pruned(clock, 0.51, model)
    assert kept.sum() == 32
    assert same_bits(list(before.values()), list(model.state_dict().values()))
    assert all(p is parameters[n] for n, p in model.named_parameters())
    assert [m.training for m in model.modules()] == flags


def test_widths_respect_bounds_and_rounding() -> None:
    target = Target(round_to=4, bounds={"first": Bound(most=16), "second": Bound(least=12)})
    kept, _ = pruned(Clock(), 0.51, target=target)
    assert kept.sum() == 32 and (kept % 4 == 0).all() and kept[0] <= 16 and kept[1] >= 12
    assert pruned(Clock(), 0.9, target=target)[0].tolist() == [16, 24]  # all that the bounds allow
    fixed = Target(bounds={"first": Bound(least=20, most=20), "second": Bound(least=10, most=10)})
    assert pruned(Clock(), 0.9, target=fixed)[0].tolist() == [20, 10]


def test_whole_budget_needs_no_measurement() -> None:
    target, told = Target(bounds={"first": Bound(most="50%")}), []
    kept, _ = pruned(Clock(), 1.0, target=target, tell=lambda text, *_: told.append(text))
    assert kept.tolist() == [20, 24] and not told


def test_later_rounds_refer_to_the_dense_network() -> None:
    clock = Clock()
    dense, half = network(clock), network(clock, (20, 12))
    for left, expected in ((0.51, 32), (0.26, 16), (0.4, 25)):
        kept, _ = pruned(clock, 0.9, half, reference=dense, left=left)
        assert kept.sum() == expected
    target = Target(bounds={"first": Bound(least="25%")})
    kept, _ = pruned(clock, 0.2, half, target, reference=dense, dense={"first": 40, "second": 24})
    assert kept[0] >= 10 and kept.sum() == 12


def test_noise_is_averaged_out() -> None:
    """At 3 % of noise in each run the budget is met within a few per cent."""
    for seed in range(5):
        kept, _ = pruned(Clock(noise=0.03, seed=seed), 0.5)
        assert 0.42 <= kept.sum() / 64 <= 0.53


def test_budget_within_the_noise_is_noted() -> None:
    """One width is allowed, and it takes as long as the budget says: no measurement can tell the side."""
    target, noted = Target(bounds={"first": Bound(least=20, most=20), "second": Bound(least=12, most=12)}), []
    for seed in range(100):
        try:
            noted += pruned(Clock(noise=0.05, seed=seed), 0.5, target=target)[1]
        except BudgetError as error:
            assert re.search(r"the smallest measured is 5[0-4]", str(error))  # six runs at the least, of 5 % noise
    text = r"latency (4[6-9]|50)[.\d]*% \(4[.\d]+%\.\.5[.\d]+%\): the budget of 50% lies within the noise"
    assert 10 < len(noted) < 40  # a quarter passes at first and at second sight
    assert all(re.fullmatch(text, note) for note in noted)
    clear, notes = pruned(Clock(noise=0.05), 0.7, target=target)
    assert clear.tolist() == [20, 12] and not notes


def test_budget_that_noise_hides_is_refused() -> None:
    with pytest.raises(
        BudgetError,
        match=r"budget\.latency: 95% cannot be told from 100% here: the same network against itself measures "
        r"[\d.]+%\.\.[\d.]+% \(40 repeats\)\. Raise timing\.repeats or timing\.batch_size, quieten",
    ):
        pruned(Clock(noise=0.3), 0.95)
    assert pruned(Clock(noise=0.3), 0.3)[0].sum() < 30  # the same noise does not matter for less


def test_budget_of_latency_out_of_reach_is_named() -> None:
    clock = Clock()
    with pytest.raises(
        BudgetError,
        match=r"budget\.latency: 50% of the dense network's time cannot be reached; the smallest measured is "
        r"77.3% \(77.3%..77.3%\), 2 groups offered, \d refused. Raise the budget",
    ):
        pruned(clock, 0.5, network(clock, idle=200 * TAKES))


@pytest.mark.parametrize("slower", [1.2, 20])
def test_candidate_that_is_not_confirmed_gives_way_to_a_narrower_one(slower: float) -> None:
    """The machine turns slower for all but the dense network when the search is over."""
    clock, told = Clock(), []
    passes = clock.passes

    def slow(seconds: float) -> None:  # the last that the search looks at is one dimension too wide
        over = seconds < 64 * TAKES and any("33 of 64" in text for text in told)
        passes(seconds * (slower if over else 1))

    clock.passes = slow  # type: ignore[method-assign]
    if slower == 20:
        with pytest.raises(BudgetError, match=r"the smallest measured is 125%"):
            pruned(clock, 0.51, tell=lambda text, *_: told.append(text))
    else:
        kept, _ = pruned(clock, 0.51, tell=lambda text, *_: told.append(text))
        assert 0.4 * 64 <= kept.sum() * slower <= 0.51 * 64
        assert sum("second sight" in text for text in told) >= 2


def test_progress_is_told_once_for_each_candidate() -> None:
    told: list[tuple[str, int, int]] = []
    pruned(Clock(), 0.5, tell=lambda *progress: told.append(progress))
    assert [done for _, done, _ in told[:-1]] == list(range(1, len(told)))
    assert told[-1][1] == told[-1][2] == told[0][2] <= HALVINGS + 3
    assert told[0][0] == "the dense network against itself: 100% (100%..100%)"
    assert told[1][0] == "latency 6.25% (6.25%..6.25%) with 4 of 64 dimensions"


def test_clear_candidates_take_few_runs() -> None:
    """Without noise every look is clear at once, save for those that lie on the budget itself."""
    few, many = Clock(), Clock()
    for clock, left in ((few, 0.51), (many, 0.5)):
        pruned(clock, left, repeats=40)
    assert few.runs < 300 < many.runs


def test_only_latency_is_chosen_by_latency() -> None:
    with pytest.raises(ValueError, match="choose_by_latency: expected a budget of latency; got macs"):
        choose_by_latency(nn.Identity(), groups_of("chain"), {}, Budget(macs=0.5), Target(), Timing(), torch.ones(2))


def test_models_are_run_in_turn_after_a_warm_up() -> None:
    clock, order = Clock(), []

    def named(name: str, seconds: Iterator[float]) -> nn.Module:
        def forward(self: Any, x: Tensor) -> Tensor:
            assert torch.is_inference_mode_enabled() and not any(m.training for m in self.modules())
            order.append(name)
            clock.passes(next(seconds))
            return x

        return Net(forward, norm=nn.BatchNorm1d(3))

    a, b = named("a", iter([9.0] * 3 + [0.001, 0.004, 0.002, 0.003])), named("b", iter([9.0] * 3 + [0.005] * 4))
    times = compare([a, b], torch.randn(2, 3), 4, clock=clock)
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
    (times,) = compare([model], x, 3)
    assert len(times.samples) == 3 and all(t > 0 for t in times.samples)
    assert float(model.seen) == 0 and not hasattr(model, "cache") and float(x.sum()) == 6


def test_inputs_of_all_forms_are_timed() -> None:
    x, add = torch.randn(2, 3), Net(lambda self, a, b=0: a + b)
    for inputs in (x, (x, x)):
        assert len(compare([add], inputs, 2)[0].samples) == 2
    assert len(compare([nn.Identity()], {"input": x}, 2)[0].samples) == 2
    assert len(compare([Net(lambda self, images: images[0])], [x, x], 2)[0].samples) == 2
    with pytest.raises(TypeError, match="example_inputs: expected a tensor"):
        compare([add], 3, 2)
    with pytest.raises(ValueError, match="repeats: expected at least 1; got 0"):
        compare([add], x, 0)


def test_batch_is_the_first_example_repeated() -> None:
    x = torch.randn(3, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    batch = batched(x, 5)
    assert batch.shape == (5, 4, 5, 5) and all(torch.equal(row, x[0]) for row in batch)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    pair = batched((x, x[:, 0], 7), 2)
    assert [getattr(v, "shape", v) for v in pair] == [(2, 4, 5, 5), (2, 5, 5), 7]
    assert {k: tuple(v.shape) for k, v in batched({"image": x}, 1).items()} == {"image": (1, 4, 5, 5)}
    images = [torch.randn(3, 8, 8)]
    assert batched(images, 4) is images
    assert batched((x, x[:2]), 4)[0] is x  # which dimension is the batch is not plain
    with pytest.raises(TypeError, match="got int"):
        batched(3, 2)


def test_ratio_is_that_of_neighbouring_runs() -> None:
    """A machine that slows down tenfold half-way does not matter: both are slower."""
    drift = np.array([1.0] * 10 + [10.0] * 10)
    found = ratio(Times(tuple(2 * drift)), Times(tuple(drift)))
    assert found == Ratio(0.5, 0.5, 0.5, 20) and str(found) == "50% (50%..50%)"
    with pytest.raises(ValueError, match="ratio: expected as many runs of both; got 2 and 1"):
        ratio(Times((1.0, 1.0)), Times((1.0,)))
    assert ratio(Times((0.0,)), Times((0.0,))).value == 0


@pytest.mark.parametrize("pairs", [6, 8, 15, 30, 61, 120])
def test_interval_of_the_ratio_holds_it_in_95_of_100_cases(pairs: int) -> None:
    """Skewed noise with outliers, of which nothing is assumed but that pairs are alike and independent."""
    random, held, trials = np.random.default_rng(pairs), 0, 500
    noise = random.lognormal(0, 0.2, (trials, 2, pairs)) * (1 + 5 * (random.random((trials, 2, pairs)) < 0.05))
    for dense, candidate in noise:
        found = ratio(Times(tuple(dense)), Times(tuple(0.6 * candidate)))
        assert found.low <= found.value <= found.high
        held += found.low <= 0.6 <= found.high
    assert held / trials >= 0.93


def test_interval_is_the_narrowest_pair_of_order_statistics_with_95_percent() -> None:
    """The table of the sign test: n, and the rank at which the interval of the median begins."""
    for pairs, rank_ in ((3, 1), (5, 1), (6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (30, 10), (50, 18)):
        found = ratio(Times((1.0,) * pairs), Times(tuple(np.arange(1.0, pairs + 1))))
        assert (found.low, found.high) == (rank_, pairs + 1 - rank_), pairs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_work_on_a_gpu_is_waited_for() -> None:
    model, x = nn.Linear(4096, 4096).cuda(), torch.randn(4096, 4096, device="cuda")
    small = nn.Linear(4096, 8).cuda()
    assert ratio(*compare([model, small], x, 10)).value < 0.9


def test_latency_is_not_computed() -> None:
    groups = groups_of("chain")
    with pytest.raises(ValueError, match=r"budget\.latency is measured, not computed: call .*choose_by_latency"):
        choose(groups, random_importance(groups), Budget(latency=0.5), Target())
    with pytest.raises(ValueError, match=r"budget\.latency is measured, not computed"):
        smallest(groups, Budget(latency=0.5), Target())


def test_batch_that_a_model_does_not_run_on_is_named() -> None:
    """It is named before a budget is searched for; where times are only reported, the inputs as they are will do."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).view(2, 4)

    model, x = Net(forward, first=nn.Linear(8, 12), last=nn.Linear(12, 4)), torch.randn(2, 8)
    groups = compress.find_groups(model, x)
    asked = (Budget(latency=0.5), Target(), Timing(batch_size=3), x)
    text = r"timing.batch_size: the model does not run on inputs of shape \[\[3, 8\]\]: RuntimeError: shape"
    with pytest.raises(ValueError, match=text):
        check_reach(model, groups, *asked)
    with pytest.raises(ValueError, match=text):
        choose_by_latency(model, groups, random_importance(groups), *asked)
    times, size = compare_batches([model, model], x, Timing(batch_size=3, repeats=3))
    assert len(times) == 2 and size == "that of the example inputs"
    assert compare_batches([model], x, Timing(batch_size=2, repeats=3))[1] == 2
