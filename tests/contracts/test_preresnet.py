"""PreResNet-164 matches table 4.1 of the thesis (Xue 2022); its cuts and their predicted MACs are exact."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models import PreResNet, preresnet164, preresnet164_cifar100
from benchmarks.preresnet import (
    MIN_KEEP,
    THESIS_MACS,
    CostRange,
    cost_range,
    find_inner_groups,
    find_thesis_groups,
    split_widths,
    uniform_widths,
)
from cases import distance, randomise_, run
from compress import Plan
from compress.graph import Groups
from compress.graph.costs import Cost

LEFT = (0.6, 0.4)


def counted_macs(model: nn.Module) -> int:
    """Count the MACs with torch's FLOP counter, independently of groups."""
    dtype = next(model.parameters()).dtype
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.zeros(1, 3, 32, 32, dtype=dtype))
    return counter.get_total_flops() // 2


@cache
def dense_model_and_groups() -> tuple[PreResNet, Groups]:
    model = preresnet164().eval()
    return model, find_inner_groups(model)


@cache
def cached_cost_range(left: float) -> CostRange:
    return cost_range(dense_model_and_groups()[1].cost, left)


def keep_first_channels(cost: Cost, widths: np.ndarray) -> dict[str, range]:
    return {name: range(width) for name, width in zip(cost.names, widths.tolist(), strict=True)}


def test_preresnet164_has_the_parameters_and_macs_of_the_thesis() -> None:
    model, groups = dense_model_and_groups()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1.7e6, rel=0.005)
    assert counted_macs(model) == pytest.approx(2.48e8, rel=0.002)
    assert counted_macs(model) == int(groups.cost.macs(groups.cost.widths))
    convolutions = sum(isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) for m in model.modules())
    assert convolutions == 1 + 3 * 18
    assert preresnet164_cifar100().linear.out_features == 100


def test_groups_are_the_inner_channels_that_network_slimming_counts() -> None:
    model, groups = dense_model_and_groups()
    scales = [m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert sum(scales) == 12112
    inner = [m.num_features for n, m in model.named_modules() if n.endswith(("bn2", "bn3"))]
    assert sorted(groups.cost.widths.tolist()) == sorted(inner)
    assert int(groups.cost.widths.sum()) == 4032


def test_other_depths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"depth: expected 9 n \+ 2, such as 20 or 164; got 50"):
        PreResNet(50)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("left", LEFT)
def test_uniform_cut_is_exact(left: float, residual: bool) -> None:
    model = randomise_(PreResNet(20).double().eval())
    groups = find_inner_groups(PreResNet(20).eval(), residual=residual)
    widths = uniform_widths(groups.cost, left)
    generator = np.random.default_rng(0)
    keep = {g.name: np.sort(generator.permutation(g.width)[:w]) for g, w in zip(groups, widths, strict=True)}
    plan = Plan.build(model, groups, keep)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    zeroed, sliced = plan.zero_(copy.deepcopy(model)), plan.apply_(copy.deepcopy(model))
    assert distance(run(zeroed, x), run(sliced, x)) < 1e-12
    assert distance(run(zeroed, x), run(model, x)) > 1e-3
    assert counted_macs(sliced) == int(groups.cost.macs(widths))
    assert sum(p.numel() for p in sliced.parameters()) == int(groups.cost.params(widths))


@pytest.mark.parametrize("left", LEFT)
def test_random_splits_lie_within_the_cost_range(left: float) -> None:
    model, groups = dense_model_and_groups()
    cost = groups.cost
    lowest, highest = (int(cost.macs(w)) for w in (cached_cost_range(left).cheapest, cached_cost_range(left).dearest))
    for widths in (cached_cost_range(left).cheapest, cached_cost_range(left).dearest):
        assert int(widths.sum()) == int(left * 4032)
        assert ((widths >= MIN_KEEP) & (widths <= cost.widths)).all()
        assert counted_macs(
            Plan.build(model, groups, keep_first_channels(cost, widths)).apply_(preresnet164())
        ) == cost.macs(widths)
    generator = np.random.default_rng(0)
    for _ in range(50):
        layer_preference = generator.uniform(
            0, generator.uniform(0, 5), len(cost.widths)
        )  # random preference for some layers
        preference = np.repeat(layer_preference, cost.widths) + generator.uniform(0, 1, 4032)
        owners = np.repeat(np.arange(len(cost.widths)), cost.widths)[np.argsort(-preference)]
        widths = np.maximum(np.bincount(owners[: int(left * 4032)], minlength=len(cost.widths)), MIN_KEEP)
        excess = int(widths.sum()) - int(left * 4032)
        widths[int(widths.argmax())] -= excess
        assert lowest <= int(cost.macs(widths)) <= highest


def test_cost_range_equals_exhaustive_search() -> None:
    cost = find_inner_groups(PreResNet(11).eval()).cost
    removed = np.stack(np.meshgrid(*[np.arange(6)] * 6, indexing="ij"), -1).reshape(-1, 6)
    costs = cost.macs(cost.widths - removed[removed.sum(1) == 5])
    extremes = cost_range(cost, 219 / 224)
    assert int(cost.macs(extremes.cheapest)) == costs.min() < costs.max() == int(cost.macs(extremes.dearest))


@pytest.mark.parametrize("data", THESIS_MACS)
@pytest.mark.parametrize("left", LEFT)
def test_macs_of_the_thesis_are_reachable(data: str, left: float) -> None:
    """At 40 % on CIFAR-10 the MACs of the thesis are close to the upper end of the range."""
    cost = dense_model_and_groups()[1].cost
    thesis_macs = THESIS_MACS[data][round(100 - 100 * left)]
    assert (
        int(cost.macs(cached_cost_range(left).cheapest)) < thesis_macs < int(cost.macs(cached_cost_range(left).dearest))
    )
    assert int(cost.macs(uniform_widths(cost, left))) < 0.7 * thesis_macs


def test_splits_of_all_channels_that_the_thesis_counts_bracket_its_macs() -> None:
    """By hand: 10 % of the inner channels and 55 % of the selections gone leave 1.83e8, 20 % and 80 % 1.42e8."""
    groups = find_thesis_groups(preresnet164().eval())
    assert groups.cost.widths.sum() == 12112

    def macs(left: float, inner_pruned: float) -> float:
        return float(groups.cost.macs(split_widths(groups, left, inner_pruned)))

    assert macs(0.6, 0.1) == pytest.approx(1.83e8, rel=0.01)
    assert macs(0.4, 0.2) == pytest.approx(1.42e8, rel=0.02)
    assert macs(0.4, 0.3) == pytest.approx(1.18e8, rel=0.02)
    assert macs(0.6, 0.1) < THESIS_MACS["cifar10"][40] < macs(0.6, 0.0)
    assert macs(0.4, 0.3) < THESIS_MACS["cifar10"][60] < macs(0.4, 0.2)
