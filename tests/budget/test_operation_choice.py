"""Operations within a budget, against brute force; their costs against counts by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import compress
from compress.budget import Operations, choose_operations, smallest_operations
from compress.budget.operation_choice import strongest, within_limit
from compress.modules import Option
from compress.recipe import Budget, Timing
from helpers.choice_networks import conv_choices
from helpers.virtual_clock import VirtualClock

INPUT = torch.zeros(2, 3, 8, 8)


def operations() -> Operations:
    return Operations(conv_choices(), INPUT, Timing(repeats=3))


def test_macs_and_parameters_of_candidates_are_those_counted_by_hand() -> None:
    costs = operations().costs("macs")
    assert costs["blocks"] == {"conv3": 2 * 9 * 8 * 8 * 64, "conv1": 2 * 8 * 8 * 64, "skip": 0}
    assert costs["down"] == {"conv": 9 * 8 * 16 * 16, "wide": (25 * 8 * 32 + 32 * 16) * 16}
    params = operations().costs("params")
    assert params["blocks"] == {"conv3": 2 * (9 * 64 + 8 + 16), "conv1": 2 * (64 + 8 + 16), "skip": 0}


def random_decisions(random: np.random.Generator) -> tuple[list[list[Option]], dict[str, dict[str, float]]]:
    costs = {
        f"g{i}": {f"c{k}": float(random.integers(0, 30)) for k in range(random.integers(2, 5))}
        for i in range(random.integers(1, 5))
    }
    decisions = [[Option({g: c}, float(random.random())) for c in table] for g, table in costs.items()]
    return decisions, costs


def assignments(decisions: list[list[Option]], costs: dict[str, dict[str, float]]) -> Iterator[tuple[float, float]]:
    for options in itertools.product(*decisions):
        yield sum(costs[g][c] for o in options for g, c in o.chosen.items()), sum(o.strength for o in options)


@pytest.mark.parametrize("seed", range(40))
def test_choice_within_a_limit_is_that_of_brute_force(seed: int) -> None:
    random = np.random.default_rng(seed)
    decisions, costs = random_decisions(random)
    limit = float(random.integers(0, 90))
    chosen = within_limit(decisions, costs, limit)
    feasible = [strength for cost, strength in assignments(decisions, costs) if cost <= limit]
    if not feasible:
        assert chosen is None
        return
    assert chosen is not None
    strength = {(g, c): o.strength for options in decisions for o in options for g, c in o.chosen.items()}
    assert sum(costs[g][c] for g, c in chosen.items()) <= limit
    assert sum(strength[item] for item in chosen.items()) == pytest.approx(max(feasible))


def test_real_costs_are_rounded_up_so_that_the_limit_holds() -> None:
    random = np.random.default_rng(0)
    costs = {f"g{i}": {f"c{k}": float(random.random()) for k in range(4)} for i in range(6)}
    decisions = [[Option({g: c}, float(random.random())) for c in table] for g, table in costs.items()]
    for limit in (1.5, 2.0, 3.0):
        chosen = within_limit(decisions, costs, limit)
        assert chosen is not None
        assert sum(costs[g][c] for g, c in chosen.items()) <= limit
        best = max(s for cost, s in assignments(decisions, costs) if cost <= limit)
        found = sum(o.strength for d in decisions for o in d if all(chosen[g] == c for g, c in o.chosen.items()))
        assert found >= best - 0.02


def test_without_a_budget_the_strongest_win() -> None:
    strengths = {"blocks": {"conv3": 0.2, "conv1": 0.5, "skip": 0.3}, "down": {"conv": 0.6, "wide": 0.4}}
    choice = choose_operations(operations(), strengths, Budget(auto=True))
    assert choice.chosen == {"blocks": "conv1", "down": "conv"}
    assert strongest([[Option({"a": "x"}, 1.0), Option({"a": "y"}, 2.0)]]) == {"a": "y"}


@pytest.mark.parametrize("unit", ["macs", "params"])
def test_budget_is_of_the_costliest_network_and_holds_for_the_network_that_is_left(unit: str) -> None:
    ops = operations()
    strengths = {"blocks": {"conv3": 0.9, "conv1": 0.06, "skip": 0.04}, "down": {"conv": 0.1, "wide": 0.9}}
    largest = ops.network({"blocks": "conv3", "down": "wide"})
    for left in (0.9, 0.7, 0.5):
        choice = choose_operations(ops, strengths, Budget.model_validate({unit: left}))
        network = ops.network(choice.chosen)
        assert cost(network, unit) <= left * cost(largest, unit)
        assert choice.left == pytest.approx({unit: cost(network, unit) / cost(largest, unit)})
        assert any("of the costliest network" in note for note in choice.notes)
    assert choose_operations(ops, strengths, Budget.model_validate({unit: 1.0})).chosen["blocks"] == "conv3"


def cost(network: nn.Module, unit: str) -> float:
    if unit == "params":
        return sum(p.numel() for p in network.parameters())
    total = 0.0

    def count(module: nn.Module, _: object, out: Tensor) -> None:
        nonlocal total
        weight = module.weight
        assert isinstance(weight, Tensor)
        total += weight.numel() * (out[0, 0].numel() if out.ndim == 4 else 1)

    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(count)
    with torch.no_grad():
        network(INPUT[:1])
    return total


def test_a_budget_out_of_reach_names_the_smallest() -> None:
    ops = operations()
    strengths = {group: dict.fromkeys(names, 0.5) for group, names in ops.candidates.items()}
    budget = Budget(macs=0.01)
    smallest = smallest_operations(ops, strengths, budget)["macs"]
    with pytest.raises(compress.BudgetError, match=rf"budget: macs 1%.*cheapest leave macs .*\({smallest:.3g} of the"):
        choose_operations(ops, strengths, budget)


def timed_operations() -> Operations:
    clock = VirtualClock()

    class Timed(nn.Module):
        """Takes some time on the clock."""

        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds

        def forward(self, x: Tensor) -> Tensor:
            clock.passes(self.seconds)
            return x

    model = nn.Sequential(
        compress.Choice(slow=Timed(0.004), fast=Timed(0.001), shared="a"),
        compress.Choice(slow=Timed(0.006), fast=Timed(0.001), shared="a"),
        compress.Choice(x=Timed(0.002), y=Timed(0.003)),
        nn.Linear(3, 3),
    )
    return Operations(model, torch.zeros(1, 3), Timing(repeats=3), clock=clock)


def test_times_are_measured_for_each_candidate_in_all_places_that_share_it() -> None:
    times = timed_operations().costs("latency")
    assert times["a"] == pytest.approx({"slow": 10.0, "fast": 2.0})
    assert times["2"] == pytest.approx({"x": 2.0, "y": 3.0})


def test_latency_budget_is_met_as_measured() -> None:
    ops = timed_operations()
    strengths = {"a": {"slow": 0.9, "fast": 0.1}, "2": {"x": 0.4, "y": 0.6}}
    choice = choose_operations(ops, strengths, Budget(latency=0.5))
    assert choice.chosen == {"a": "fast", "2": "y"}  # 5 of 13 ms
    assert choice.left["latency"] == pytest.approx(5 / 13)
    assert choose_operations(ops, strengths, Budget.model_validate({"latency": "5.1 ms"})).chosen == choice.chosen
    with pytest.raises(compress.BudgetError, match=r"budget: latency 20%.*the cheapest leave latency"):
        choose_operations(ops, strengths, Budget(latency=0.2))


def test_several_and_absolute_limits_hold_together() -> None:
    ops = operations()
    strengths = {"blocks": {"conv3": 0.9, "conv1": 0.06, "skip": 0.04}, "down": {"conv": 0.1, "wide": 0.9}}
    budget = Budget.model_validate({"macs": "150k", "params": "80%", "size": "40 kB"})
    choice = choose_operations(ops, strengths, budget)
    network, largest = ops.network(choice.chosen), ops.network({"blocks": "conv3", "down": "wide"})
    assert cost(network, "macs") <= 150e3
    assert cost(network, "params") <= 0.8 * cost(largest, "params")
    assert len(safetensors.torch.save(dict(network.state_dict()))) <= 40e3
    best = max(
        sum(strengths[g][c] for g, c in chosen.items())
        for chosen in ({"blocks": b, "down": d} for b in strengths["blocks"] for d in strengths["down"])
        if cost(ops.network(chosen), "macs") <= 150e3
        and cost(ops.network(chosen), "params") <= 0.8 * cost(largest, "params")
        and len(safetensors.torch.save(dict(ops.network(chosen).state_dict()))) <= 39e3
    )
    assert sum(strengths[g][c] for g, c in choice.chosen.items()) >= best - 1e-9
