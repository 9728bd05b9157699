"""Several rounds share the budget and the steps, and compose to one plan."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import compress
from helpers.digits import SEARCH, TIMING, dense, loaders


def test_rounds_compose_to_one_plan_for_the_dense_model() -> None:
    for unit in ("macs", "params", "dims"):
        model, (train, val) = dense(), loaders()
        recipe = {"budget": {unit: "40%"}, "search": SEARCH, "steps": 3, "timing": TIMING}
        pruned = compress.prune(model, recipe, train=train, val=val, quiet=True)
        zeroed = pruned.plan.zero_(copy.deepcopy(model).double())
        sliced = pruned.plan.apply_(copy.deepcopy(model).double())
        x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
        assert torch.allclose(zeroed(x), sliced(x), rtol=0, atol=1e-10)
        assert [p.shape for p in sliced.parameters()] == [p.shape for p in pruned.model.parameters()]
        report = pruned.report
        if unit == "dims":
            assert sum(map(len, pruned.plan.keep.values())) <= 0.4 * sum(pruned.plan.widths.values())
        else:
            assert getattr(report.pruned, unit) <= 0.4 * getattr(report.dense, unit)
        names = [record["stage"] for record in report.history]
        assert list(dict.fromkeys(names)) == ["search 1", "search 2", "search 3"]


def test_rounds_share_the_steps_of_the_search() -> None:
    train, val = loaders()
    recipe = {"budget": {"macs": "50%"}, "search": {**SEARCH, "epochs": "11 steps"}, "steps": 3, "timing": TIMING}
    pruned = compress.prune(dense(), recipe, train=train, val=val, quiet=True)
    last = {record["stage"]: record["step"] for record in pruned.report.history}
    assert last == {"search 1": 4, "search 2": 4, "search 3": 3}


@pytest.mark.parametrize("search", [{"method": "magnitude"}, {"method": "netslim", "epochs": "6 steps"}])
@pytest.mark.parametrize("unit", ["macs", "params", "dims"])
def test_final_widths_are_multiples_of_round_to(unit: str, search: dict[str, object]) -> None:
    torch.manual_seed(0)
    widths = [1, 60, 64, 20, 48, 10]  # 60 and 20 are no multiples: these layers may stay whole
    layers: list[nn.Module] = []
    for width_in, width in pairwise(widths[:-1]):
        layers += [nn.Conv2d(width_in, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))
    data = [(torch.randn(8, 1, 8, 8), torch.randint(10, (8,))) for _ in range(6)]
    for budget in ("70%", "45%"):
        recipe = {
            "budget": {unit: budget},
            "target": {"round_to": 8},
            "search": search,
            "steps": 3,
            "timing": {"repeats": 3},
        }
        plan = compress.prune(model, recipe, train=data, quiet=True).plan
        kept = {name: len(dims) for name, dims in plan.keep.items()}
        assert list(plan.widths.values()) == widths[1:-1]
        assert all(n % 8 == 0 or n == plan.widths[name] for name, n in kept.items()), kept
        assert kept != plan.widths
