"""Common mistakes: the error says where, what was expected, what came and what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from cases import CASES, Net, build, example
from helpers.block_network import HALF_MACS, block_network


def test_budget_that_cannot_be_met_is_an_error_in_prune_and_a_verdict_in_preview() -> None:
    x = torch.randn(1, 3, 8, 8)
    recipe = {"budget": {"macs": "1%"}}
    with pytest.raises(compress.BudgetError, match=r"budget\.macs: 1% .* cannot be reached; the smallest that can"):
        compress.prune(block_network(), recipe, example_inputs=x)
    seen = compress.preview(block_network(), recipe, example_inputs=x)
    assert not seen.reachable
    assert 0.01 < seen.smallest["macs"] < 1
    assert "cannot be reached" in seen.message
    assert compress.preview(block_network(), {"budget": seen.smallest}, example_inputs=x).reachable


def test_budget_out_of_reach_names_what_the_target_leaves_alone() -> None:
    case, recipe = CASES["residual_stream"], {"budget": {"macs": "1%"}}
    match = r"2 groups offered, \d refused\)\. 1 group is not cut: target\.residual is off\. Raise the budget"
    with pytest.raises(compress.BudgetError, match=match):
        compress.prune(build(case), recipe, example_inputs=example(case))
    assert re.search(match, compress.preview(build(case), recipe, example_inputs=example(case)).message)
    bare = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))  # what every network leaves alone is not told
    with pytest.raises(compress.BudgetError, match=r"1 groups offered, 1 refused\)\. Raise the budget"):
        compress.prune(bare, recipe, example_inputs=torch.randn(1, 4))


def test_budget_out_of_reach_counts_a_reason_in_all_modules() -> None:
    class Mixed(nn.Module):
        """Inner channels that are divided by their mean, as a GRN does."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x).relu()
            return x + self.b(y / (1 + y.mean(-1, keepdim=True)))

    mixed = nn.Sequential(nn.Linear(4, 6), Mixed(), Mixed(), nn.Linear(6, 3))
    match = (
        r"0 groups offered, 4 refused\)\. "
        r"2 groups are not cut; the first: its dimension is summed over by `mean` \(in 1\)\. "
        r"1 group is not cut: target\.residual is off\. Allow more in target\.$"
    )
    with pytest.raises(compress.BudgetError, match=match):
        compress.prune(mixed, {"budget": {"macs": "50%"}}, example_inputs=torch.randn(1, 4))


def test_model_that_cannot_be_traced_says_so_where_nothing_is_left_to_cut() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x).relu()
        return m.b(2 * y if float(y.detach().sum()) > 1e9 else y)

    def net() -> nn.Module:
        return Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 3))

    x, match = torch.randn(2, 4), r"the whole model cannot be traced.* set target\.one_path: true to cut it"
    with pytest.raises(compress.BudgetError, match=rf"0 groups offered, .*{match}"):
        compress.prune(net(), HALF_MACS, example_inputs=x)
    loader = [(x, torch.tensor([0, 1]))]
    for budget in ({"macs": "100%"}, {"latency": "50%"}):
        recipe = {"budget": budget, "search": {"method": "netslim", "epochs": "2 steps"}}
        with pytest.raises(compress.NotReady, match=rf"target: there is nothing to cut; .*{match}"):
            compress.prune(net(), recipe, train=loader, quiet=True)


def test_importance_of_a_model_with_broken_weights_is_an_error() -> None:
    broken = block_network()
    with torch.no_grad():
        broken[1].conv2.weight[0, 2] = float("nan")
    with pytest.raises(ValueError, match=r"importance of 1\.conv1: .* NaN"):
        compress.prune(broken, HALF_MACS, example_inputs=torch.randn(1, 3, 8, 8))


def test_preview_and_prune_agree_on_costs() -> None:
    case = CASES["residual_stream_with_projection"]
    recipe = {"budget": {"macs": "60%"}, "target": {"residual": True}}
    seen = compress.preview(build(case), recipe, example_inputs=example(case))
    done = compress.prune(build(case), recipe, example_inputs=example(case))
    assert (seen.report.dense.params, seen.report.dense.macs) == (done.report.dense.params, done.report.dense.macs)
    assert [row.kept for row in seen.report.groups] == [row.kept for row in done.report.groups]  # it needs no data
    assert "fraction of its dimensions" not in seen.message
    trained = compress.preview(build(case), recipe | {"search": {"method": "taylor"}}, example_inputs=example(case))
    assert trained.message.endswith("every group keeps about the same fraction of its dimensions")
    assert done.report.pruned.macs <= 0.6 * done.report.dense.macs
    assert done.report.pruned.params == sum(p.numel() for p in done.model.parameters())
    assert {row.name: row.kept for row in done.report.groups} == {n: len(k) for n, k in done.plan.keep.items()}


def test_planted_useless_channel_is_ranked_last() -> None:
    net = Net(lambda m, x: m.b(torch.relu(m.a(x))), a=nn.Linear(4, 8), b=nn.Linear(8, 3))
    with torch.no_grad():
        net.b.weight[:, [2, 5]] *= 1e-3
    done = compress.prune(net, {"budget": {"dims": "75%"}}, example_inputs=torch.randn(1, 4))
    assert done.plan.keep == {"a": [0, 1, 3, 4, 6, 7]}
