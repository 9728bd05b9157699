"""Plans round-trip through JSON, name the model they fit, and compose."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import compress
from cases import CASES, build, distance, example, groups_of, random_keep, run, same_bits
from cases.networks_plain import cbr, head
from compress import Plan, PlanError


def planned(name: str, ratio: float = 0.5, seed: int = 0) -> tuple[nn.Module, Plan]:
    model, groups = build(CASES[name]), groups_of(name)
    return model, Plan.build(model, groups, random_keep(groups, ratio, seed))


@pytest.mark.parametrize("name", CASES)
def test_plan_round_trips_through_json(name: str, tmp_path: Path) -> None:
    _, plan = planned(name)
    path = tmp_path / "plan.json"
    plan.save(path)
    again = Plan.load(path)
    assert again.to_dict() == plan.to_dict() == json.loads(json.dumps(plan.to_dict()))
    assert again.digest() == plan.digest()
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_group_that_is_not_mentioned_stays_whole() -> None:
    model, groups = build(CASES["chain"]), groups_of("chain")
    plan = Plan.build(model, groups, {"1.0": [0, 5]})
    assert plan.keep == {"0.0": list(range(8)), "1.0": [0, 5], "3.0": list(range(7))}
    plan.apply_(model)
    assert [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)] == [8, 2, 7]


def test_plan_that_keeps_all_changes_nothing() -> None:
    case = CASES["residual_stream_with_projection"]
    model, x = build(case), example(case)
    before, shapes = run(model, x), {n: t.shape for n, t in model.state_dict().items()}
    plan = Plan.build(model, groups_of(case.name), {})
    plan.zero_(model)
    plan.apply_(model)
    assert same_bits(run(model, x), before)
    assert {n: t.shape for n, t in model.state_dict().items()} == shapes


def test_order_and_type_of_what_is_kept_do_not_matter() -> None:
    model, groups = build(CASES["chain"]), groups_of("chain")
    plans = [
        Plan.build(model, groups, {"0.0": kept}).to_dict()
        for kept in ([1, 4, 6], [6, 1, 4, 4], np.array([4, 6, 1]), torch.tensor([1, 6, 4]), (1, 4, 6))
    ]
    assert all(plan == plans[0] for plan in plans)


def test_invalid_keep_is_an_error_that_names_the_group() -> None:
    model, groups = build(CASES["chain"]), groups_of("chain")
    with pytest.raises(PlanError, match=r"no group named '0\.1'; the model has 0\.0, 1\.0, 3\.0"):
        Plan.build(model, groups, {"0.1": [0]})
    with pytest.raises(PlanError, match=r"group 1\.0: expected at least one of its 6 dimensions"):
        Plan.build(model, groups, {"1.0": []})
    with pytest.raises(PlanError, match=r"group 1\.0: expected indices in 0\.\.5, got 2\.\.6"):
        Plan.build(model, groups, {"1.0": [2, 6]})
    with pytest.raises(PlanError, match=r"group 1\.0: expected indices in 0\.\.5, got -1\.\.3"):
        Plan.build(model, groups, {"1.0": [-1, 3]})


def test_mask_is_not_mistaken_for_indices() -> None:
    model, groups = build(CASES["chain"]), groups_of("chain")
    mask = torch.tensor([True, False, True, True, False, True])
    try:
        plan = Plan.build(model, groups, {"1.0": mask})
    except (PlanError, TypeError):
        return
    assert plan.keep["1.0"] == [0, 2, 3, 5]


@pytest.mark.parametrize("what", ["zero_", "apply_"])
def test_plan_for_another_model_is_an_error_that_names_the_tensors(what: str) -> None:
    _, plan = planned("chain")
    wider = nn.Sequential(cbr(3, 9), cbr(9, 6), nn.MaxPool2d(2), cbr(6, 7), head(7)).double()
    before = copy.deepcopy(wider.state_dict())
    with pytest.raises(PlanError, match=r"0\.0\.weight: expected shape \[8, 3, 3, 3\], the model has \[9, 3, 3, 3\]"):
        getattr(plan, what)(wider)
    with pytest.raises(PlanError, match=r"0\.0\.weight: .* the model has none of that name"):
        getattr(plan, what)(nn.Conv2d(3, 4, 1).double())
    assert all(torch.equal(before[name], tensor) for name, tensor in wider.state_dict().items())


def test_plan_cannot_be_applied_twice() -> None:
    model, plan = planned("chain")
    plan.apply_(model)
    with pytest.raises(PlanError, match="apply it to the dense model it was made from"):
        plan.apply_(model)


def test_gated_model_is_not_sliced() -> None:
    model, plan = planned("chain")
    compress.surgery.gates.attach_(model, groups_of("chain"))
    with pytest.raises(PlanError, match="fold_"):
        plan.apply_(model)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', "no json", '"plan"', "\x00\x01", "3"])
def test_file_that_is_not_a_plan_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json: not a plan"):
        Plan.load(path)


def test_plan_with_damaged_indices_is_an_error(tmp_path: Path) -> None:
    _, plan = planned("chain")
    for damage, text in (
        (
            {"indices": []},
            "slices 0.0.weight: expected for each dimension an index into `indices`, with positions within",
        ),
        ({"slices": 5}, "not a plan: slices: expected a table; got 5"),
        ({"keep": [1]}, "not a plan: keep: expected a table"),
        ({"shapes": None}, "not a plan: shapes: expected a table; got None"),
    ):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(plan.to_dict() | damage))
        with pytest.raises(PlanError, match=rf"plan\.json: {text}"):
            Plan.load(path)


def test_plan_of_another_version_is_an_error(tmp_path: Path) -> None:
    _, plan = planned("chain")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_dict() | {"version": 99}))
    with pytest.raises(PlanError, match="version 99: this library reads version 1"):
        Plan.load(path)


def test_saving_leaves_no_temporary_files(tmp_path: Path) -> None:
    _, plan = planned("chain")
    plan.save(tmp_path / "deep" / "plan.json")
    plan.save(tmp_path / "deep" / "plan.json")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["plan.json"]


def test_plans_that_do_not_follow_each_other_are_an_error() -> None:
    _, first = planned("chain", 0.5)
    _, second = planned("chain", 0.3)
    with pytest.raises(PlanError, match=r"the second plan expects 8 .*, the first leaves 7"):
        first.then(second)


def test_three_plans_compose_in_any_bracketing() -> None:
    case = CASES["residual_stream_with_projection"]
    model, x = build(case), example(case)
    plans, current = [], copy.deepcopy(model)
    for seed in range(3):
        groups = compress.find_groups(current, x)
        plans.append(Plan.build(current, groups, random_keep(groups, 0.8, seed)))
        plans[-1].apply_(current)
    a, b, c = plans
    left, right = a.then(b).then(c), a.then(b.then(c))
    assert left.to_dict() == right.to_dict()
    assert same_bits(run(left.apply_(model), x), run(current, x))


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("few_large_groups", {"0.0": [0, 3], "1.0": [1, 5]}),
        ("transposed_convolution_in_few_large_groups", {"0.0": [0, 3], "1": [1, 2]}),
        ("channel_shuffle_by_module", {"0.0": [0, 2]}),
    ],
)
def test_second_cut_composes_when_the_groups_differ(name: str, first: dict[str, list[int]]) -> None:
    """After the first cut the groups are other ones, and the second plan cuts whole groups."""
    model, x = build(CASES[name]), example(CASES[name])
    one = Plan.build(model, groups_of(name), first)
    small = one.apply_(copy.deepcopy(model))
    again = compress.find_groups(small, x)
    two = Plan.build(small, again, random_keep(again, 0.5))
    smaller = two.apply_(copy.deepcopy(small))
    both = one.then(two)
    assert same_bits(run(both.apply_(copy.deepcopy(model)), x), run(smaller, x))
    assert distance(run(both.zero_(copy.deepcopy(model)), x), run(smaller, x)) <= 1e-10
    assert Plan.from_dict(json.loads(json.dumps(both.to_dict()))).to_dict() == both.to_dict()


def test_plan_names_no_tensor_that_stays_whole() -> None:
    model, plan = planned("chain")
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    for name, dims in plan.slices.items():
        assert plan.shapes[name] == shapes[name]
        assert any(len(kept) < shapes[name][dim] for dim, kept in dims.items())


def test_plan_for_another_model_leads_with_how_many_tensors_differ() -> None:
    _, plan = planned("chain")
    head_line = r"made for another model \(apply it to .*\); of the {n} tensors that are cut, the model {how}:\n  "
    n = len(plan.shapes)
    with pytest.raises(PlanError, match=head_line.format(n=n, how=rf"lacks {n}")):
        plan.check(nn.Linear(3, 4))
    wider = nn.Sequential(cbr(3, 99), nn.Linear(3, 3))
    with pytest.raises(PlanError, match=head_line.format(n=n, how=r"lacks \d+ and has \d+ in another shape")):
        plan.check(wider)


def test_reprs_are_short() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    recipe, x = {"budget": {"dims": "50%"}, "timing": {"repeats": 3}}, torch.randn(1, 4)
    pruned = compress.prune(net, recipe, example_inputs=x, quiet=True)
    report = "Report(28 of 56 MACs, 35 of 67 parameters, 1 groups, 1 left alone)"
    assert repr(pruned.plan) == "Plan(1 groups, 4 of 8 dimensions kept)"
    assert repr(pruned.report) == report
    assert repr(pruned) == f"Pruned(Sequential, {pruned.plan},\n       {report})"
    assert repr(compress.preview(net, recipe, example_inputs=x)) == f"Preview(within reach, {report})"
    beyond = compress.preview(net, {"budget": {"dims": "1%"}}, example_inputs=x)
    assert repr(beyond).startswith("Preview(out of reach, Report(")
    assert compress.Report.from_dict(json.loads(pruned.report.to_json())) == pruned.report
