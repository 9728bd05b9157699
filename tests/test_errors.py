"""What a user gets wrong first, and what is said about it: where, what was expected, what came, what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from case import Net, build, example
from cases import CASES
from networks_plain import Block, cbr, head
from torch import Tensor, nn

import compress
from compress import TraceError
from compress.recipe import Target

RECIPE = {"budget": {"macs": "50%"}}


def model() -> nn.Module:
    return nn.Sequential(cbr(3, 6), Block(6, 6), head(6)).eval()


@pytest.mark.parametrize("call", [compress.prune, compress.preview])
def test_inputs_of_a_wrong_shape_are_described(call: Any) -> None:
    wrong = torch.randn(2, 4, 8, 8)
    match = r"(?s)the model does not run on torch\.float32\[2, 4, 8, 8\]: it stops in 0\.0 .*expected.* 3 channels"
    with pytest.raises(TraceError, match=match):
        call(model(), RECIPE, example_inputs=wrong)
    with pytest.raises(TraceError, match="leading batch dimension"):
        call(model(), RECIPE, example_inputs=torch.randn(2, 8, 3, 8))


def test_what_is_no_model_and_no_target_is_named() -> None:
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module; got str 'resnet18'"):
        compress.find_groups("resnet18", x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module; got the class Identity"):
        compress.find_groups(nn.Identity, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"target: expected a compress\.recipe\.Target; got dict \{'residual': True\}"):
        compress.find_groups(model(), x, {"residual": True})  # type: ignore[arg-type]


def test_too_many_arguments_are_an_error() -> None:
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(TraceError, match="it stops in the model with TypeError"):
        compress.find_groups(model(), (x, x))
    with pytest.raises(TraceError, match=r"picture=torch\.float32"):
        compress.find_groups(model(), {"picture": x})
    with pytest.raises(TraceError, match="no arguments"):
        compress.find_groups(model(), ())


@pytest.mark.parametrize("wrong", [None, "image.png", 3, {1, 2}])
def test_inputs_that_are_no_call_are_an_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"example_inputs: expected a tensor, .* got {type(wrong).__name__}"):
        compress.find_groups(model(), wrong)


def test_inputs_may_be_a_tensor_a_tuple_or_a_dict() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, left: Tensor, right: Tensor | None = None) -> Tensor:
            return self.b(torch.relu(self.a(left if right is None else left + right)))

    x = torch.randn(5, 4)
    for inputs in (x, (x,), (x, x), {"left": x}, {"left": x, "right": x}, (x, None)):
        groups = compress.find_groups(Two(), inputs)
        assert [(g.name, g.width) for g in groups] == [("a", 6)]
        assert int(groups.cost.macs([6])) == 6 * 4 + 6 * 3  # of one example, whatever the batch


def test_include_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"target\.include: '1\.conv3' matches no module of the model; .*1\.conv"):
        compress.find_groups(model(), torch.randn(1, 3, 8, 8), Target(include=("1.conv3",)))


def test_exclude_that_matches_nothing_names_the_nearest() -> None:
    recipe = RECIPE | {"target": {"exclude": ["re:1.con"]}}
    match = r"target\.exclude: 're:1\.con' matches no module of the model; the nearest names are .*1\.conv1"
    with pytest.raises(ValueError, match=match):
        compress.prune(model(), recipe, example_inputs=torch.randn(1, 3, 8, 8))


def test_expression_that_is_wrong_is_named() -> None:
    """When the recipe is read, not when the groups are known."""
    for target in ({"exclude": ["re:(head"]}, {"include": ["re:(head"]}, {"bounds": {"re:(head": {"least": 2}}}):
        with pytest.raises(compress.RecipeError, match=r"target\.[a-z.0(:]*: 're:\(head' is not a regular expression"):
            compress.Recipe.load(RECIPE | {"target": target})


def names(**target: Any) -> list[str]:
    case = CASES["residual_stream"]
    return [g.name for g in compress.find_groups(build(case), example(case), Target(**target))]


def test_target_says_which_groups_are_offered() -> None:
    assert names() == ["1.conv1", "2.conv1"]
    assert names(residual=True) == ["0.0", "1.conv1", "2.conv1"]
    assert names(residual=True, channels=False) == ["0.0"]
    assert names(channels=False) == []
    assert names(include=("1",)) == ["1.conv1"]
    assert names(include=("1", "re:2.*")) == ["1.conv1", "2.conv1"]
    assert names(exclude=("re:.*conv1",)) == []
    assert names(include=("1",), exclude=("1.conv1",)) == []
    assert names(residual=True, exclude=("2.conv2",)) == ["1.conv1", "2.conv1"]


def test_what_the_target_leaves_out_is_refused_with_that_reason() -> None:
    case = CASES["residual_stream"]
    groups = compress.find_groups(build(case), example(case), Target(exclude=("1.conv1",)))
    reasons = {r.name: r.reason for r in groups.refused}
    assert reasons.items() >= {"0.0": "target.residual is off", "1.conv1": "in target.exclude"}.items()


def test_budget_that_cannot_be_met_is_an_error_in_prune_and_a_verdict_in_preview() -> None:
    x = torch.randn(1, 3, 8, 8)
    recipe = {"budget": {"macs": "1%"}}
    with pytest.raises(compress.BudgetError, match=r"budget\.macs: 1% .* cannot be reached; the smallest that can"):
        compress.prune(model(), recipe, example_inputs=x)
    seen = compress.preview(model(), recipe, example_inputs=x)
    assert not seen.reachable
    assert 0.01 < seen.smallest < 1
    assert "cannot be reached" in seen.message
    assert compress.preview(model(), {"budget": {"macs": seen.smallest}}, example_inputs=x).reachable


def test_budget_out_of_reach_names_what_the_target_leaves_alone() -> None:
    case, recipe = CASES["residual_stream"], {"budget": {"macs": "1%"}}
    match = r"2 groups offered, \d refused\)\. 1 is left alone: target\.residual is off\. Raise the budget"
    with pytest.raises(compress.BudgetError, match=match):
        compress.prune(build(case), recipe, example_inputs=example(case))
    assert re.search(match, compress.preview(build(case), recipe, example_inputs=example(case)).message)
    bare = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))  # what every network leaves alone is not told
    with pytest.raises(compress.BudgetError, match=r"1 groups offered, 1 refused\)\. Raise the budget"):
        compress.prune(bare, recipe, example_inputs=torch.randn(1, 4))


def test_budget_out_of_reach_counts_a_reason_in_whatever_module_it_is_found() -> None:
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
        r"0 groups offered, 4 refused\)\. 2 are left alone: is summed over by `mean` \(first in 1\)\. "
        r"1 is left alone: target\.residual is off\. Allow more in target\.$"
    )
    with pytest.raises(compress.BudgetError, match=match):
        compress.prune(mixed, {"budget": {"macs": "50%"}}, example_inputs=torch.randn(1, 4))


def test_model_that_cannot_be_traced_says_so_where_nothing_is_left_to_cut() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x).relu()
        return m.b(2 * y if float(y.detach().sum()) > 1e9 else y)

    def net() -> nn.Module:
        return Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 3))

    x, match = torch.randn(2, 4), r"the whole model cannot be traced.* target\.one_path would trust the path"
    with pytest.raises(compress.BudgetError, match=rf"0 groups offered, .*{match}"):
        compress.prune(net(), RECIPE, example_inputs=x)
    loader = [(x, torch.tensor([0, 1]))]
    for budget in ({"macs": "100%"}, {"latency": "50%"}):
        recipe = {"budget": budget, "search": {"method": "netslim", "epochs": "2 steps"}}
        with pytest.raises(compress.NotReady, match=rf"target: there is nothing to cut; .*{match}"):
            compress.prune(net(), recipe, train=loader, quiet=True)


def test_model_without_parameters_has_no_groups() -> None:
    groups = compress.find_groups(nn.Sequential(nn.ReLU(), nn.Flatten()), torch.randn(1, 3, 8, 8))
    assert len(groups) == 0


def test_importance_of_a_model_with_broken_weights_is_an_error() -> None:
    broken = model()
    with torch.no_grad():
        broken[1].conv2.weight[0, 2] = float("nan")
    with pytest.raises(ValueError, match=r"importance of 1\.conv1: .* NaN"):
        compress.prune(broken, RECIPE, example_inputs=torch.randn(1, 3, 8, 8))


def test_preview_and_prune_agree_on_costs() -> None:
    case = CASES["residual_stream_with_projection"]
    recipe = {"budget": {"macs": "60%"}, "target": {"residual": True}}
    seen = compress.preview(build(case), recipe, example_inputs=example(case))
    done = compress.prune(build(case), recipe, example_inputs=example(case))
    assert (seen.report.dense.params, seen.report.dense.macs) == (done.report.dense.params, done.report.dense.macs)
    assert [row.kept for row in seen.report.groups] == [row.kept for row in done.report.groups]  # it needs no data
    assert "worth the same" not in seen.message
    trained = compress.preview(build(case), recipe | {"search": {"method": "taylor"}}, example_inputs=example(case))
    assert trained.message.endswith("Widths are shown as if all dimensions were worth the same")
    assert done.report.pruned.macs <= 0.6 * done.report.dense.macs
    assert done.report.pruned.params == sum(p.numel() for p in done.model.parameters())
    assert {row.name: row.kept for row in done.report.groups} == {n: len(k) for n, k in done.plan.keep.items()}


def test_planted_useless_channel_is_ranked_last() -> None:
    net = Net(lambda m, x: m.b(torch.relu(m.a(x))), a=nn.Linear(4, 8), b=nn.Linear(8, 3))
    with torch.no_grad():
        net.b.weight[:, [2, 5]] *= 1e-3
    done = compress.prune(net, {"budget": {"dims": "75%"}}, example_inputs=torch.randn(1, 4))
    assert done.plan.keep == {"a": [0, 1, 3, 4, 6, 7]}
