"""Models whose code branches on data: only what holds for every branch is cut."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import compress
from cases import CASES, Net, build, distance, example, groups_of, random_keep, randomise_, run
from cases.networks_plain import cbr, head
from compress import Plan


def images(sign: int = 1, batch: int = 1) -> Tensor:
    return sign * torch.rand(batch, 3, 8, 8, generator=torch.Generator().manual_seed(3)).double()


def check(model: nn.Module, *inputs: Tensor, ratio: float = 0.5) -> compress.graph.Groups:
    """Find groups on the first input; zeroed and sliced networks have to agree on all."""
    model = randomise_(model.double()).eval()
    groups = compress.find_groups(model, inputs[0])
    plan = Plan.build(model, groups, random_keep(groups, ratio))
    zeroed, sliced = plan.zero_(copy.deepcopy(model)), plan.apply_(copy.deepcopy(model))
    for x in inputs:
        assert distance(run(zeroed, x), run(sliced, x)) <= 1e-10
    return groups


def names(groups: compress.graph.Groups) -> list[str]:
    return [g.name for g in groups]


def test_both_branches_stay_exact() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.high(m.body(x)) if float(x.sum()) > 0 else m.low(m.body(x))

    parts = {"body": nn.Sequential(cbr(3, 6), cbr(6, 5)), "high": nn.Sequential(cbr(5, 7), head(7)), "low": head(5)}
    groups = check(Net(forward, **parts), images(1), images(-1))
    assert {g.name for g in groups} >= {"body.0.0", "high.0.0"}


def test_branch_that_the_example_does_not_take_may_mix_channels() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.conv1(x)
        if float(x.sum()) < 0:
            y = y.flip(1)
        return m.conv2(y)

    model = Net(forward, conv1=nn.Conv2d(3, 6, 3), conv2=nn.Conv2d(6, 4, 3))
    assert names(check(model, images(1), images(-1))) == []


LOOKS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: sum(x.sum((1, 2, 3)).tolist()),
    "numpy": lambda x: x.detach().numpy().sum(),
    "any": lambda x: 1 if bool((x > 0).any()) else -1,
    "nonzero": lambda x: len((x > 0).nonzero()) or -1,
    "min": lambda x: min(float(row.sum()) for row in x),
}


@pytest.mark.parametrize("look", LOOKS)
def test_looking_at_the_data_is_noticed_however_it_is_done(look: str) -> None:
    """The body can be traced; what the caller does with its inside is another matter."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.body(x)
        return m.last(y) if LOOKS[look](x) > 0 else m.last(y.flip(1))

    body = nn.Sequential(cbr(3, 6), cbr(6, 5))
    last = nn.Sequential(nn.Conv2d(5, 4, 1), nn.ReLU())
    assert names(check(Net(forward, body=body, last=last), images(1), images(-1))) == ["body.0.0"]


def test_branch_that_the_example_does_not_take_may_show_channels() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.conv1(x)
        return m.conv2(y) if float(x.sum()) > 0 else y

    model = Net(forward, conv1=nn.Conv2d(3, 6, 3), conv2=nn.Conv2d(6, 4, 3))
    assert names(check(model, images(1), images(-1))) == []


def test_caller_may_use_the_inside_of_a_traced_child() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.body(x)
        if float(x.sum()) > 1e9:
            y = -y
        return y + F.conv2d(x, m.body[0].weight)[:, :4].mean() + F.conv2d(x, m.body[0].weight).cumsum(1)[:, -1].mean()

    body = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1))
    assert names(check(Net(forward, body=body), images(1), images(-1))) == []


def test_caller_may_run_a_part_of_a_traced_child() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.body(x)
        if float(x.sum()) > 1e9:
            y = -y
        return y + m.body[0](x).cumsum(1)[:, -1:].mean()

    body = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1))
    assert names(check(Net(forward, body=body), images(1))) == []


def test_child_that_is_called_twice_is_exact_on_both_calls() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.body(x)
        return y + m.body(F.avg_pool2d(x, 2)).mean() if float(y.detach().sum()) > -1e9 else y

    groups = check(Net(forward, body=nn.Sequential(cbr(3, 6), cbr(6, 5), nn.Conv2d(5, 2, 1))), images(1), images(-1))
    assert len(groups) >= 2


def test_multiply_adds_of_what_is_not_traced_are_counted() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.body(x)
        return m.last(y) if float(x.sum()) > 0 else m.last(-y)

    body = nn.Sequential(cbr(3, 6), cbr(6, 5))
    model = Net(forward, body=body, last=nn.Conv2d(5, 3, 3)).double().eval()
    groups = compress.find_groups(model, images())
    with FlopCounterMode(display=False) as counter:
        run(model, images())
    assert 2 * int(groups.cost.macs(groups.cost.widths)) == counter.get_total_flops()


def test_notes_say_what_could_not_be_traced() -> None:
    notes = groups_of("data_dependent_control_flow").notes
    assert any("the whole model cannot be traced" in n and "the values of a tensor" in n for n in notes), notes


def test_notes_name_the_module_that_could_not_be_traced() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(cbr(6, 5), cbr(5, 6))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if float(x.sum()) > 0 else x

    model = nn.Sequential(cbr(3, 6), Deciding(), head(6)).double().eval()
    groups = compress.find_groups(model, images())
    assert any(note.startswith("1 (Deciding) cannot be traced") for note in groups.notes), groups.notes
    assert [g.name for g in groups] == ["1.inner.0.0"]


def test_parameters_that_are_never_used_are_noted() -> None:
    model = Net(lambda m, x: m.head(m.body(x)), body=cbr(3, 6), head=head(6), spare=nn.Linear(4, 4)).double().eval()
    groups = compress.find_groups(model, images())
    assert any("do not use 2 parameters, for example spare.bias" in note for note in groups.notes), groups.notes
    assert len(groups) == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_case_with_control_flow_is_exact_for_other_data(sign: int) -> None:
    case = CASES["data_dependent_control_flow"]
    model, groups = build(case), groups_of(case.name)
    plan = Plan.build(model, groups, random_keep(groups, 0.4))
    x = sign * 5 * example(case, seed=9)
    zeroed = run(plan.zero_(copy.deepcopy(model)), x)
    assert distance(zeroed, run(plan.apply_(model), x)) <= 1e-10


def branching(m: Any, x: Tensor) -> Tensor:
    y = m.norm(m.conv1(x)).relu()
    if float(y.sum()) > 1e9:
        y = 2 * y
    return m.last(F.adaptive_avg_pool2d(m.conv2(m.depthwise(y)).relu(), 2).flatten(1))


def branching_network(**more: nn.Module) -> nn.Module:
    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    parts = {"conv1": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8), "depthwise": depthwise}
    return Net(branching, **parts, conv2=nn.Conv2d(8, 12, 1), last=nn.Linear(48, 5), **more)


def test_one_path_is_cut_exactly_when_it_is_asked_for() -> None:
    model = randomise_(branching_network().double()).eval()
    assert len(compress.find_groups(model, images())) == 0
    groups = compress.find_groups(model, images(), compress.recipe.Target(residual=True, one_path=True))
    assert [(g.name, g.width) for g in groups] == [("conv1", 8), ("conv2", 12)]
    assert any("torch-pruning, which sees only the path" in note for note in groups.notes)
    plan = Plan.build(model, groups, random_keep(groups, 0.5))
    zeroed, sliced = plan.zero_(copy.deepcopy(model)), plan.apply_(copy.deepcopy(model))
    assert distance(run(zeroed, images()), run(sliced, images())) <= 1e-10
    with FlopCounterMode(display=False) as counter:
        run(sliced, images())
    kept = [len(plan.keep[name]) for name in groups.cost.names]
    assert 2 * int(groups.cost.macs(kept)) == counter.get_total_flops()


def test_one_path_that_leaves_layers_untouched_is_not_trusted() -> None:
    model = branching_network(other=nn.Conv2d(8, 12, 1)).double().eval()
    groups = compress.find_groups(model, images(), compress.recipe.Target(residual=True, one_path=True))
    assert len(groups) == 0
    assert any("a run does not use other; another run might" in note for note in groups.notes)


def test_notes_on_uncut_layers_say_what_could_be_done() -> None:
    groups = compress.find_groups(branching_network().double().eval(), images())
    assert any("the model is not cut; set target.one_path: true to cut it" in note for note in groups.notes)


def test_one_path_without_torch_pruning_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    model = branching_network().double().eval()
    with pytest.raises(
        compress.NotReady, match=r'target.one_path: the model .* pip install "compress\[torch-pruning\]"'
    ):
        compress.find_groups(model, images(), compress.recipe.Target(residual=True, one_path=True))
    assert len(compress.find_groups(model, images())) == 0
