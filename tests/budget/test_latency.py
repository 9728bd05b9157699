"""A latency budget is met as measured, or the error says why it cannot be."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress
from cases import groups_of, same_bits
from compress import BudgetError
from compress.budget.choose import choose_widths
from compress.budget.latency import MAX_BISECTIONS, choose_by_latency
from compress.budget.ranking import comparable_importance
from compress.budget.timing import LatencyMeasurement
from compress.recipe import Bound, Budget, Target, Timing
from helpers.virtual_clock import SECONDS_PER_DIMENSION, VirtualClock, timed_network
from helpers.widths import random_importance, widths_of


def pruned(
    clock: VirtualClock, part: float, model: nn.Module | None = None, target: Target | None = None, **more: Any
) -> tuple[np.ndarray, list[str]]:
    """The widths that a latency budget leaves, and the notes."""
    model, timing, x = model or timed_network(clock), Timing(repeats=more.pop("repeats", 10)), torch.randn(2, 8)
    groups = compress.find_groups(model, x)
    clock.start()
    measurement = LatencyMeasurement(x, timing, more.pop("reference", None), clock, more.pop("on_progress", None))
    args = (model, groups, random_importance(groups), Budget(latency=part), target or Target(round_to=1), measurement)
    keep, notes = choose_by_latency(*args, **more)
    return widths_of(groups, keep), notes


@pytest.mark.parametrize("left", [0.1, 0.33, 0.51, 0.76, 0.9])
def test_budget_of_latency_is_met_and_tight(left: float) -> None:
    """Without noise the time is known: so many dimensions fit, and all of them are found."""
    kept, notes = pruned(VirtualClock(), left)
    assert kept.sum() == int(64 * left) and notes == []


@pytest.mark.parametrize("ranking", ["global", "group", "cost"])
def test_choice_by_latency_follows_the_ranking(ranking: Any) -> None:
    """Where time is in proportion to dimensions, a budget of dimensions with the same ranking agrees."""
    clock = VirtualClock()
    model = timed_network(clock)
    groups, target = compress.find_groups(model, torch.randn(2, 8)), Target(min_keep=1, round_to=1)
    importance, x = random_importance(groups), torch.randn(2, 8)
    args = (model, groups, importance, Budget(latency=0.51), target, LatencyMeasurement(x, Timing(), clock=clock))
    found, _ = choose_by_latency(*args, ranking=ranking)
    ranked = comparable_importance(groups, importance, ranking, "latency")
    expected = choose_widths(groups, ranked, Budget(dims=0.51), target)
    assert {n: k.tolist() for n, k in found.items()} == {n: k.tolist() for n, k in expected.items()}


def test_model_is_untouched_by_the_choice() -> None:
    clock = VirtualClock()
    model = nn.Sequential(nn.BatchNorm1d(8), timed_network(clock)).train()
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
    kept, _ = pruned(VirtualClock(), 0.51, target=target)
    assert kept.sum() == 32 and (kept % 4 == 0).all() and kept[0] <= 16 and kept[1] >= 12
    assert pruned(VirtualClock(), 0.9, target=target)[0].tolist() == [16, 24]  # all that the bounds allow
    fixed = Target(round_to=1, bounds={"first": Bound(least=20, most=20), "second": Bound(least=10, most=10)})
    assert pruned(VirtualClock(), 0.9, target=fixed)[0].tolist() == [20, 10]


def test_whole_budget_needs_no_measurement() -> None:
    target, told = Target(round_to=1, bounds={"first": Bound(most="50%")}), []
    kept, _ = pruned(VirtualClock(), 1.0, target=target, on_progress=lambda text, *_: told.append(text))
    assert kept.tolist() == [20, 24] and not told


def test_later_rounds_refer_to_the_dense_network() -> None:
    clock = VirtualClock()
    dense, half = timed_network(clock), timed_network(clock, (20, 12))
    for left, expected in ((0.51, 32), (0.26, 16), (0.4, 25)):
        kept, _ = pruned(clock, 0.9, half, reference=dense, limits={"latency": left})
        assert kept.sum() == expected
    target = Target(round_to=1, bounds={"first": Bound(least="25%")})
    kept, _ = pruned(clock, 0.2, half, target, reference=dense, dense_widths={"first": 40, "second": 24})
    assert kept[0] >= 10 and kept.sum() == 12


def test_noise_is_averaged_out() -> None:
    """At 3 % of noise in each run the budget is met within a few per cent."""
    for seed in range(5):
        kept, _ = pruned(VirtualClock(noise=0.03, seed=seed), 0.5)
        assert 0.42 <= kept.sum() / 64 <= 0.53


def test_budget_within_the_noise_is_noted() -> None:
    """One width is allowed, and it takes as long as the budget says: no measurement can tell the side."""
    target, noted = (
        Target(round_to=1, bounds={"first": Bound(least=20, most=20), "second": Bound(least=12, most=12)}),
        [],
    )
    for seed in range(100):
        try:
            noted += pruned(VirtualClock(noise=0.05, seed=seed), 0.5, target=target)[1]
        except BudgetError as error:
            assert re.search(r"the smallest measured is 5[0-4]", str(error))  # six runs at the least, of 5 % noise
    text = r"latency (4[6-9]|50)[.\d]*% \(4[.\d]+%\.\.5[.\d]+%\): the budget of 50% lies within the noise"
    assert 10 < len(noted) < 40  # a quarter passes at first and when measured again
    assert all(re.fullmatch(text, note) for note in noted)
    clear, notes = pruned(VirtualClock(noise=0.05), 0.7, target=target)
    assert clear.tolist() == [20, 12] and not notes


def test_budget_that_noise_hides_is_refused() -> None:
    with pytest.raises(
        BudgetError,
        match=r"budget\.latency: 95% cannot be distinguished from 100% on this machine: the dense network timed "
        r"against itself gives [\d.]+%\.\.[\d.]+% \(40 repeats\)\. Raise timing\.repeats or timing\.batch_size, stop",
    ):
        pruned(VirtualClock(noise=0.3), 0.95)
    assert pruned(VirtualClock(noise=0.3), 0.3)[0].sum() < 30  # the same noise does not matter for less


def test_budget_of_latency_out_of_reach_is_named() -> None:
    clock = VirtualClock()
    with pytest.raises(
        BudgetError,
        match=r"budget\.latency: 50% of the dense network's time cannot be reached; the smallest measured is "
        r"77.3% \(77.3%..77.3%\), 2 groups offered, \d refused. Raise the budget",
    ):
        pruned(clock, 0.5, timed_network(clock, idle=200 * SECONDS_PER_DIMENSION))


@pytest.mark.parametrize("slower", [1.2, 20])
def test_candidate_that_is_not_confirmed_gives_way_to_a_narrower_one(slower: float) -> None:
    """The machine turns slower for all but the dense network when the search is over."""
    clock, told = VirtualClock(), []
    passes = clock.passes

    def slow(seconds: float) -> None:  # the last that the search looks at is one dimension too wide
        over = seconds < 64 * SECONDS_PER_DIMENSION and any("33 of 64" in text for text in told)
        passes(seconds * (slower if over else 1))

    clock.passes = slow  # type: ignore[method-assign]
    if slower == 20:
        with pytest.raises(BudgetError, match=r"the smallest measured is 125%"):
            pruned(clock, 0.51, on_progress=lambda text, *_: told.append(text))
    else:
        kept, _ = pruned(clock, 0.51, on_progress=lambda text, *_: told.append(text))
        assert 0.4 * 64 <= kept.sum() * slower <= 0.51 * 64
        assert sum("measured again" in text for text in told) >= 2


def test_progress_is_reported_once_for_each_candidate() -> None:
    told: list[tuple[str, int, int]] = []
    pruned(VirtualClock(), 0.5, on_progress=lambda *progress: told.append(progress))
    assert [done for _, done, _ in told[:-1]] == list(range(1, len(told)))
    assert told[-1][1] == told[-1][2] == told[0][2] <= MAX_BISECTIONS + 3
    assert told[0][0] == "the dense network against itself: 100% (100%..100%)"
    assert told[1][0] == "latency 6.25% (6.25%..6.25%) with 4 of 64 dimensions"


def test_clear_candidates_take_few_runs() -> None:
    """Without noise every look is clear at once, save for those that lie on the budget itself."""
    few, many = VirtualClock(), VirtualClock()
    for clock, left in ((few, 0.51), (many, 0.5)):
        pruned(clock, left, repeats=40)
    assert few.runs < 320 < many.runs  # verification of the plan included


def test_only_latency_is_chosen_by_latency() -> None:
    with pytest.raises(ValueError, match="choose_by_latency: expected a latency budget; got macs"):
        measurement = LatencyMeasurement(torch.ones(2), Timing())
        choose_by_latency(nn.Identity(), groups_of("chain"), {}, Budget(macs=0.5), Target(), measurement)


def test_latency_is_not_computed() -> None:
    groups = groups_of("chain")
    with pytest.raises(ValueError, match=r"budget\.latency is measured, not computed: call .*choose_by_latency"):
        choose_widths(groups, random_importance(groups), Budget(latency=0.5), Target())
