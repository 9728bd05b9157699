"""Penalties: the price of each dimension, scores that reach zero, and a learned budget."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import compress
from compress.budget.latency import choose_by_latency, measure_dimension_times
from compress.budget.pruning_schedule import PruningSchedule
from compress.budget.timing import LatencyMeasurement
from compress.modules.shared_copies import shared_copy
from compress.progress import ProgressDisplay
from compress.recipe import Recipe, Timing
from compress.search.base import Job, search_class
from compress.search.score_training.penalty import Penalty
from compress.search.score_training.regularizer import (
    hard_threshold,
    soft_threshold,
    transformed_l1,
    transformed_l1_threshold,
)
from helpers.bilevel import TWO_BATCH_METHODS, as_leaves, batch_pair, started_search
from helpers.bilevel import small_convolutions as small
from helpers.digits import dense, loaders
from helpers.regression import RegressionTask, with_useless_features
from helpers.virtual_clock import SECONDS_PER_DIMENSION, VirtualClock, timed_network

TRAINED = [*TWO_BATCH_METHODS, "netslim"]


def batch_for(method: str) -> Any:
    return batch_pair() if search_class(method).batches_per_step == 2 else batch_pair()[0]


@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.parametrize("penalty", ["l1", "macs"])
def test_proximal_step_is_soft_thresholding_after_the_step_on_the_loss(method: str, penalty: str) -> None:
    """The same step without penalty, thresholded by the learning rate, gamma and the dimension's price."""
    free, search = (started_search(method, gamma=g, penalty=penalty, proximal=True) for g in (0.0, 8.0))
    for one in (free, search):
        one.step(batch_for(method))
    zeros = 0
    for a, b, price in zip(search.alpha, free.alpha, search.regularizer.costs, strict=True):
        assert torch.allclose(a, soft_threshold(b.detach(), 0.05 * 8.0 * price), rtol=0, atol=1e-12)
        zeros += int((a == 0).sum())
    assert zeros > 0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_proximal_steps_converge_to_the_minimum_with_any_momentum(momentum: float) -> None:
    """min (a - c)^2 / 2 + gamma |a| has the solution S(c, gamma)."""
    config = search_class("netslim").Config.model_validate(
        {"method": "netslim", "epochs": 1, "gamma": 0.4, "proximal": True, "momentum": momentum, "lr": 0.01}
    )
    c = torch.tensor([-2.0, -0.3, 0.1, 0.41, 1.5], dtype=torch.float64)
    a = nn.Parameter(torch.ones(5, dtype=torch.float64))
    penalty = Penalty(config, [a], {"a": [(a, torch.arange(5)[:, None])]}, None)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([a], lr=0.01, momentum=momentum, nesterov=momentum > 0)
    for step in range(2000):
        penalty.step_(optimizer, [a.detach() - c], step)
    assert torch.allclose(a.detach(), soft_threshold(c, 0.4), atol=1e-6)


def test_each_dimension_takes_its_part_of_the_time() -> None:
    """On a clock that goes by widths alone."""
    clock = VirtualClock()
    model, x = timed_network(clock, (40, 24), idle=36 * SECONDS_PER_DIMENSION), torch.randn(2, 8)
    groups = compress.find_groups(model, x)
    progress: list[tuple[int, int]] = []
    measurement = LatencyMeasurement(
        x, Timing(repeats=5), clock=clock, on_progress=lambda text, done, total: progress.append((done, total))
    )
    times = measure_dimension_times(model, groups, measurement)
    assert times == pytest.approx({"first": 0.01, "second": 0.01})
    assert progress == [(1, 2), (2, 2)]


def test_measured_time_is_the_price_of_the_latency_penalty() -> None:
    model = timed_network(VirtualClock())
    groups = compress.find_groups(model, torch.randn(2, 8))
    config = search_class("darts1").Config.model_validate(
        {"method": "darts1", "epochs": 1, "gamma": 0.5, "penalty": "latency", "costs": False}
    )
    search: Any = search_class("darts1")(
        config, Job(model, groups, RegressionTask(), 3, dimension_times=lambda: {"first": 0.003, "second": 0.001})
    )
    first, second = (float(p[0]) for p in search.regularizer.costs)
    assert first / second == pytest.approx(3)
    assert (40 * first + 24 * second) / 64 == pytest.approx(1)
    assert float(search.regularizer.value()) == pytest.approx(0.5 * 64)
    assert set(search.state()) == {"cost0", "cost1"}, "a resumed search goes on with the costs that it had"
    with pytest.raises(ValueError, match="latency cannot be measured in this search"):
        search_class("darts1")(config, Job(timed_network(VirtualClock()), groups, RegressionTask(), 3))


def test_latency_penalty_runs_end_to_end() -> None:
    train, val = loaders(count=256)
    search = {"method": "netslim", "epochs": "4 steps", "gamma": 1e-3, "penalty": "latency"}
    recipe = {"budget": {"macs": "60%"}, "search": search, "timing": {"repeats": 3}}
    pruned = compress.prune(dense(), recipe, train=train, val=val, quiet=True)
    assert pruned.report.pruned.macs <= 0.6 * pruned.report.dense.macs


@pytest.mark.parametrize("part", [0.4, 0.7])
def test_budget_regularizer_ends_where_a_latency_budget_will_cut(part: float) -> None:
    """On a clock that goes by widths: what is kept meets the budget, what is cut is at zero."""
    clock = VirtualClock()
    model, x = timed_network(clock).double(), torch.randn(16, 8, dtype=torch.float64)
    groups = compress.find_groups(model, x)
    recipe = Recipe.load(
        {
            "budget": {"latency": part},
            "search": {"method": "netslim", "epochs": "40 steps", "lr": 0.01},
            "timing": {"repeats": 4},
            "target": {"round_to": 1},
        }
    )
    here = (shared_copy(model), model, x, None, 0, ProgressDisplay(quiet=True))
    line = PruningSchedule(recipe, groups, *here, clock=clock, limits={"latency": part})
    reference = shared_copy(model)
    search: Any = search_class("netslim")(recipe.search, Job(model, groups, RegressionTask(), 40, schedule=line))
    y = torch.randn(16, 4, dtype=torch.float64)
    for _ in range(40):
        search.step((x, y))
    importance = search.importance()
    plain = compress.surgery.gates.fold_(model)
    measurement = LatencyMeasurement(x, recipe.timing, reference, clock)
    keep, _ = choose_by_latency(plain, groups, importance, recipe.budget, recipe.target, measurement, ranking="cost")
    left = sum(map(len, keep.values())) / 64
    assert part - 0.05 < left <= part
    for name, value in importance.items():
        assert set(np.flatnonzero(value.numpy())) == set(keep[name].tolist())


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.parametrize("how", [{"proximal": True}, {"penalty": "l1_split", "split": 0.5}])
def test_learned_budget_drops_the_planted_useless_channels(how: dict[str, Any], method: str, seed: int) -> None:
    """Nobody says how many: the scores of channels that carry nothing come to zero, and those alone."""
    model, data, useless = with_useless_features(False, seed)
    search = {"method": method, "epochs": 40, "lr": 0.1, "schedule": "constant", "momentum": 0, "gamma": 0.05, **how}
    recipe = {"budget": "auto", "search": search, "timing": {"repeats": 3}, "seed": seed}
    pruned = compress.prune(model, recipe, train=data, quiet=True)
    assert set(range(12)) - set(pruned.plan.keep["0"]) == useless


@pytest.mark.parametrize(
    ("search", "match"),
    [
        ({"method": "magnitude"}, "the scores of magnitude do not reach zero with these settings"),
        ({"method": "rarts", "epochs": 1}, "the scores of rarts do not reach zero with these settings"),
        ({"method": "netslim", "epochs": 1, "gamma": 1e-3}, "number as gamma and proximal: true"),
        ({"method": "netslim", "epochs": 1, "gamma": 0, "proximal": True}, "the scores of netslim do not reach zero"),
    ],
)
def test_learned_budget_needs_scores_that_reach_zero(search: dict[str, Any], match: str) -> None:
    with pytest.raises(compress.RecipeError, match=match) as caught:
        Recipe.load({"budget": "auto", "search": search})
    assert "problem\n  budget: auto keeps" in str(caught.value), "it says where"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"gamma": "foo"},
            r"recipe: 1 problem\n  search.gamma: expected auto, or a number that is not below zero",
        ),
        ({"gamma": -1}, r"recipe: 1 problem\n  search.gamma: expected auto, or a number that is not below zero"),
        ({"alpha": {"momentum": 1}}, r"search.alpha.momentum: .*less than 1"),
        ({"u": {"momentum": 1}}, r"search.u.momentum: .*less than 1"),
    ],
)
def test_impossible_settings_are_found_when_the_recipe_is_read(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(compress.RecipeError, match=match):
        Recipe.load({"budget": {"macs": 0.5}, "search": {"method": "rarts", "epochs": 1, **settings}})


@pytest.mark.parametrize("method", TRAINED)
def test_what_the_loss_does_not_use_is_not_decayed(method: str) -> None:
    search = started_search(method, weight_decay=0.5)
    aside = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    search.weights.append(aside)
    search.optimizer.param_groups[0]["params"].append(aside)
    if method == "rarts":
        search.u.append(nn.Parameter(aside.detach().clone()))
        search.u_optimizer.param_groups[0]["params"].append(search.u[-1])
    search.step(batch_for(method))
    assert torch.equal(aside, torch.ones_like(aside))


def test_times_within_the_noise_are_estimated_from_multiply_adds() -> None:
    class Still(VirtualClock):
        def passes(self, seconds: float) -> None:
            self.now += 1.0

    clock = Still()
    model, x = timed_network(clock), torch.randn(2, 8)
    groups = compress.find_groups(model, x)
    found = measure_dimension_times(model, groups, LatencyMeasurement(x, Timing(repeats=3), clock=clock))
    dense_macs = 8 * 40 + 40 * 24 + 24 * 4
    assert found["first"] == pytest.approx((8 + 24) / dense_macs)
    assert found["second"] == pytest.approx((40 + 4) / dense_macs)


def test_times_of_a_budget_of_latency_are_kept_for_a_resumed_search() -> None:
    recipe = Recipe.load({"budget": {"latency": 0.5}, "search": {"method": "netslim", "epochs": 1}})
    clock = VirtualClock()
    model, x = timed_network(clock), torch.randn(2, 8)
    groups = compress.find_groups(model, x)
    here = (shared_copy(model), model, x, None, 0, ProgressDisplay(quiet=True))
    line = PruningSchedule(recipe, groups, *here, clock=clock, limits={"latency": 0.5})
    search: Any = search_class("netslim")(recipe.search, Job(model, groups, RegressionTask(), 40, schedule=line))
    times = search.state()["times"]
    assert times.isnan().all()
    line.dimension_times()
    assert torch.allclose(times, torch.full((2,), 1 / 64, dtype=torch.float64))
    times.copy_(torch.tensor([0.1, 0.2]))
    runs = clock.runs
    assert line.dimension_times() == pytest.approx({"first": 0.1, "second": 0.2})
    assert clock.runs == runs


def test_budget_of_latency_out_of_reach_is_found_before_the_search() -> None:
    train, _ = loaders(count=256)

    class Counting(compress.Classification):
        steps = 0

        def loss(self, outputs: Any, batch: Any) -> Tensor:
            type(self).steps += outputs.requires_grad
            return super().loss(outputs, batch)

    recipe = {
        "budget": {"latency": "1%"},
        "search": {"method": "netslim", "epochs": 1},
        "timing": {"repeats": 3, "batch_size": 32},
    }
    with pytest.raises(compress.BudgetError, match=r"budget\.latency: 1% "):
        compress.prune(dense(), recipe, task=Counting(train), quiet=True)
    assert Counting.steps <= 1, "the trial step alone"


def test_learned_budget_is_read_and_written_and_shown() -> None:
    search = {"method": "rarts", "epochs": 1, "gamma": 1e-3, "proximal": True}
    recipe = Recipe.load({"budget": "auto", "search": search})
    assert Recipe.load(recipe.model_dump(mode="json", exclude_none=True)) == recipe
    with pytest.raises(
        compress.RecipeError, match=r"budget: expected auto, or what is left, as 50% .*; got 'atuo'\. Did you mean auto"
    ):
        Recipe.load({"budget": "atuo", "search": search})
    with pytest.raises(compress.RecipeError, match="cannot be divided into rounds"):
        Recipe.load({"budget": "auto", "search": search, "steps": 2})
    seen = compress.preview(dense(), recipe, example_inputs=torch.randn(1, 1, 8, 8))
    assert seen.reachable and "budget: auto is learned in the search" in seen.message
    assert seen.report.pruned.macs == seen.report.dense.macs


@pytest.mark.parametrize("method", TRAINED)
def test_dense_model_teaches_in_the_search_and_is_asked_once_a_batch(method: str) -> None:
    """The same step as with a loss that has the distillation written into it."""
    asked: list[Any] = []

    class Taught(RegressionTask):
        def loss(self, outputs: Any, batch: Any) -> Tensor:
            with torch.no_grad():
                teacher = other(batch[0])
            return super().loss(outputs, batch) + 0.7 * (outputs - teacher).square().mean()

    torch.manual_seed(9)
    other = copy.deepcopy(small()).eval()
    with torch.no_grad():
        other[5].bias.add_(torch.randn(4))
    ours, theirs = (started_search(method, **more) for more in ({"distill": {"weight": 0.7}}, {}))
    with pytest.raises(ValueError, match="there is no dense model to learn from"):
        ours.step(batch_for(method))
    ours.done = 0
    ours.job.teacher, theirs.job.task = copy.deepcopy(other), Taught()
    ours.job.teacher.register_forward_hook(lambda *_: asked.append(None))
    for one in (ours, theirs):
        one.step(batch_for(method))
    assert len(asked) == ours.batches_per_step
    for p, q in zip(ours.job.model.parameters(), theirs.job.model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-12)


def test_teacher_of_a_search_comes_with_the_recipe() -> None:
    train, val = loaders(count=256)
    search = {"method": "rarts", "epochs": "3 steps", "distill": {"temperature": 4, "weight": 8}}
    recipe = {"budget": {"macs": "60%"}, "search": search, "timing": {"repeats": 3}}
    pruned = compress.prune(dense(), recipe, train=train, val=val, quiet=True)
    assert pruned.report.recipe["search"]["distill"] == {"temperature": 4.0, "weight": 8.0}


@pytest.mark.parametrize("method", TRAINED)
def test_decay_of_the_scores_is_what_the_recipe_says(method: str) -> None:
    plain, decayed = (
        started_search(method, gamma=0.0, weight_decay=0.5, alpha={"weight_decay": d}) for d in (0.0, 0.3)
    )
    before: list[Tensor] = as_leaves(plain.alpha)
    for one in (plain, decayed):
        one.step(batch_for(method))
    for a, b, start in zip(decayed.alpha, plain.alpha, before, strict=True):
        assert torch.allclose(a, b - 0.05 * 0.3 * start, rtol=0, atol=1e-12)


@pytest.mark.parametrize("t", [0.0, 0.1, 0.5, 2.0])
def test_thresholding_minimises_by_brute_force(t: float) -> None:
    grid = torch.cat([torch.linspace(-4, 4, 80001, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    values = torch.tensor([-3.1, -1.2, -0.3, 0.0, 0.05, 0.44, 0.99, 1.01, 2.5], dtype=torch.float64)
    for v, soft, hard in zip(values, soft_threshold(values, t), hard_threshold(values, t), strict=True):
        bond = (grid - v).square() / 2
        assert float(grid[(t * grid.abs() + bond).argmin()]) == pytest.approx(float(soft), abs=2e-4)
        assert float(grid[(t * (grid != 0) + bond).argmin()]) == pytest.approx(float(hard), abs=2e-4)


@pytest.mark.parametrize("t", [0.05, 0.25, 0.6, 2.0])
def test_threshold_of_transformed_l1_minimises_by_brute_force(t: float) -> None:
    candidates = torch.linspace(-4, 4, 80001, dtype=torch.float64)
    values = torch.linspace(-3, 3, 61, dtype=torch.float64)
    best = t * transformed_l1(candidates) + (candidates - values[:, None]) ** 2 / 2
    found = transformed_l1_threshold(values, t)
    assert ((t * transformed_l1(found) + (found - values) ** 2 / 2) <= best.min(1).values + 1e-8).all()
    assert (found == 0).any() and (found != 0).any()


@pytest.mark.parametrize("penalty", ["l1_split", "l0_split", "tl1_split"])
def test_splitting_draws_scores_to_their_sparse_copy(penalty: str) -> None:
    search = started_search("darts1", penalty=penalty, split=0.5)
    before, sparse = as_leaves(search.alpha), [v.clone() for v in search.regularizer.sparse_copies]
    gradients = [torch.ones_like(a) for a in search.alpha]
    search.step_scores(gradients)
    thresholds = {"l1_split": soft_threshold, "l0_split": hard_threshold, "tl1_split": transformed_l1_threshold}
    threshold = thresholds[penalty]
    for a, b, v, s in zip(search.alpha, before, search.regularizer.sparse_copies, sparse, strict=True):
        assert torch.allclose(a, b - 0.05 * (1 + 0.5 * (b - s)), atol=1e-12)
        assert torch.equal(v, threshold(a.detach(), 0.2 / 0.5))
    assert all(
        (search.importance()[n][v == 0] == 0).all()
        for n, v in zip(search.score_positions, search.regularizer.sparse_copies, strict=True)
    )


def test_penalty_of_macs_weighs_each_dimension_with_its_cost() -> None:
    search = started_search("darts1", penalty="macs")
    cost = search.job.groups.cost
    each = []
    for i in range(len(cost.widths)):
        less = cost.widths.copy()
        less[i] -= 1
        each.append(int(cost.macs(cost.widths) - cost.macs(less)))
    prices = torch.tensor([float(p[0]) for p in search.regularizer.costs], dtype=torch.float64)
    assert torch.allclose(prices / prices[0], torch.tensor(each, dtype=torch.float64) / each[0])
    assert float((prices * torch.as_tensor(cost.widths)).sum() / cost.widths.sum()) == pytest.approx(1)
