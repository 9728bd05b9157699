"""Units of a budget: the cost of widths, and of one dimension, against counting in sliced networks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cases import CASES, build, example, groups_of, random_keep
from compress import Plan
from compress.budget.units import UNITS
from helpers.widths import widths_of


def count(unit: str, model: torch.nn.Module, x: torch.Tensor) -> int:
    if unit == "params":
        return sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("unit", ["macs", "params"])
@pytest.mark.parametrize("name", ["chain", "residual_stream_with_projection", "dense_connections"])
def test_cost_of_widths_is_that_of_the_sliced_network(name: str, unit: str) -> None:
    case, groups = CASES[name], groups_of(name)
    x = example(case, batch=1)
    cost_of = UNITS[unit].cost_of_widths(groups)
    dense = int(cost_of(groups.cost.widths))
    assert dense == count(unit, build(case), x)
    keep = random_keep(groups, 0.5)
    sliced = Plan.build(build(case), groups, keep).apply_(build(case))
    assert int(cost_of(widths_of(groups, keep))) == count(unit, sliced, x)
    for group, cost in zip(groups, UNITS[unit].cost_per_dimension(groups), strict=True):
        one_less = Plan.build(build(case), groups, {group.name: range(group.width - 1)}).apply_(build(case))
        assert cost == pytest.approx(dense - count(unit, one_less, x))


def test_dimensions_count_alike_and_measured_units_are_not_computed() -> None:
    groups = groups_of("chain")
    assert int(UNITS["dims"].cost_of_widths(groups)(groups.cost.widths)) == sum(g.width for g in groups)
    assert np.all(UNITS["dims"].cost_per_dimension(groups) == 1)
    for name, how in (("latency", "measured"), ("auto", "learned")):
        assert UNITS[name].for_ranking is UNITS["macs"]
        with pytest.raises(ValueError, match=rf"budget\.{name} is {how}, not computed"):
            UNITS[name].cost_of_widths(groups)
