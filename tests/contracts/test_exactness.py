"""Every stage computes a known function: dense, attached, scored, folded, zeroed, sliced, sliced again."""

from __future__ import annotations

import copy
import re
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import compress
from cases import (
    CASES,
    Case,
    build,
    distance,
    example,
    groups_of,
    random_keep,
    run,
    same_bits,
    tensors_of,
    zero_scores_,
)
from compress import Plan
from compress.surgery.gates import attach_, fold_
from compress.surgery.slicing import slice_

every_case = pytest.mark.parametrize("case", CASES.values(), ids=str)
CHOICES = list(product((0, 1), (0.3, 0.7)))  # seeds, fractions that are left


def parametrized(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if parametrize.is_parametrized(module)]


@every_case
def test_expected_groups_are_offered(case: Case) -> None:
    groups = groups_of(case.name)
    assert len(groups) >= case.groups, [(r.name, r.reason) for r in groups.refused]
    assert len({g.name for g in groups}) == len(groups)
    assert all(g.gated_slots and g.output_slots and g.width > 1 for g in groups)


@pytest.mark.parametrize("case", [c for c in CASES.values() if c.refused], ids=str)
def test_what_is_left_alone_is_listed_with_the_reason(case: Case) -> None:
    reasons = [r.reason for r in groups_of(case.name).refused]
    assert any(re.search(case.refused or "", reason) for reason in reasons), reasons


@every_case
def test_attached_at_one_is_the_dense_network(case: Case) -> None:
    for seed in (0, 1):
        model, x = build(case, seed), example(case, seed)
        dense = run(model, x)
        attach_(model, groups_of(case.name))
        assert same_bits(run(model, x), dense)


@every_case
def test_fold_is_exact_and_gives_the_parameters_back(case: Case) -> None:
    model, x = build(case), example(case)
    before = list(model.named_parameters())
    keys = list(model.state_dict())
    own = parametrized(model)
    for score in attach_(model, groups_of(case.name)).values():
        torch.nn.init.uniform_(score, -1, 2)
    scored = run(model, x)
    assert same_bits(run(fold_(model), x), scored)
    after = list(model.named_parameters())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(a is b for (_, a), (_, b) in zip(after, before, strict=True))
    assert list(model.state_dict()) == keys
    assert parametrized(model) == own


@every_case
def test_zeroed_is_scored_at_zero_is_folded(case: Case) -> None:
    groups = groups_of(case.name)
    for seed, ratio in CHOICES:
        model, x, keep = build(case, seed), example(case, seed), random_keep(groups, ratio, seed)
        zeroed = Plan.build(model, groups, keep).zero_(copy.deepcopy(model))
        zero_scores_(attach_(model, groups), keep)
        scored = run(model, x)
        assert same_bits(run(zeroed, x), scored)
        assert same_bits(run(fold_(model), x), scored)


@every_case
def test_sliced_is_zeroed(case: Case) -> None:
    groups = groups_of(case.name)
    for seed, ratio in CHOICES:
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
            model, x = build(case, seed, dtype), example(case, seed, dtype)
            plan = Plan.build(model, groups, random_keep(groups, ratio, seed))
            zeroed = run(plan.zero_(copy.deepcopy(model)), x)
            assert distance(zeroed, run(slice_(model, plan), x)) <= tolerance
            assert all(len(plan.keep[g.name]) < g.width for g in groups)


@every_case
def test_gates_and_slices_have_the_same_gradient(case: Case) -> None:
    """What is kept learns in the sliced network as it does in the zeroed one."""
    groups = groups_of(case.name)
    model, x = build(case), example(case)
    plan = Plan.build(model, groups, random_keep(groups, 0.5))
    zeroed, sliced = plan.zero_(copy.deepcopy(model)), plan.apply_(copy.deepcopy(model))
    for net in (zeroed, sliced):
        sum(t.square().mean() for t in tensors_of(net(x)) if t.requires_grad).backward()
    small = dict(sliced.named_parameters())
    scale = max(float(p.grad.abs().max()) for p in zeroed.parameters() if p.grad is not None)
    for name, parameter in zeroed.named_parameters():
        assert (parameter.grad is None) == (small[name].grad is None), name
        if parameter.grad is None:
            continue
        expected = parameter.grad
        for dim, kept in plan.slices.get(name, {}).items():
            expected = expected.index_select(dim, torch.as_tensor(kept))
        assert float((expected - small[name].grad).abs().max()) <= 1e-10 * scale, name


@every_case
def test_no_layer_reads_dropped_dimensions(case: Case) -> None:
    """Whatever stands in the dropped rows, shifts and statistics, the zeroed network computes the same."""
    groups = groups_of(case.name)
    model, x, keep = build(case), example(case), random_keep(groups, 0.5)
    Plan.build(model, groups, keep).zero_(model)
    before = run(model, x)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for group in groups:
        dropped = [i for i in range(group.width) if i not in keep[group.name]]
        for slot in group.output_slots:
            tensor = tensors[slot.tensor].data
            where = torch.as_tensor(slot.index[dropped].ravel())
            tensor.index_copy_(slot.dim, where, tensor.index_select(slot.dim, where) * 3 + 1)
            readers = [r for g in groups for r in g.gated_slots if r.tensor == slot.tensor]
            for reader in readers:  # a row of one group may be a column of another: that one stays zero
                owner = next(g for g in groups if any(s is reader for s in g.slots))
                gone = [i for i in range(owner.width) if i not in keep[owner.name]]
                tensor.index_fill_(reader.dim, torch.as_tensor(reader.index[gone].ravel()), 0)
    assert distance(before, run(model, x)) <= 1e-12


@every_case
def test_plan_on_a_fresh_model_gives_the_same_network(case: Case) -> None:
    groups = groups_of(case.name)
    model, x = build(case), example(case)
    plan = Plan.from_dict(Plan.build(model, groups, random_keep(groups, 0.5)).to_dict())
    sliced = slice_(copy.deepcopy(model), plan)
    torch.manual_seed(9)
    fresh = plan.apply_(case.make().double()).eval()
    fresh.load_state_dict(sliced.state_dict())
    assert same_bits(run(fresh, x), run(sliced, x))
    assert [n for n, _ in fresh.named_parameters()] == [n for n, _ in model.named_parameters()]


@every_case
def test_second_cut_composes_with_the_first(case: Case) -> None:
    groups, x = groups_of(case.name), example(case)
    model = build(case)
    first = Plan.build(model, groups, random_keep(groups, 0.7))
    once = first.apply_(copy.deepcopy(model))
    again = compress.find_groups(once, x)
    second = Plan.build(once, again, random_keep(again, 0.6, seed=1))
    twice = second.apply_(copy.deepcopy(once))
    assert distance(run(second.zero_(copy.deepcopy(once)), x), run(twice, x)) <= 1e-10
    both = first.then(second)
    direct = both.apply_(copy.deepcopy(model))
    assert {n: t.shape for n, t in direct.state_dict().items()} == {n: t.shape for n, t in twice.state_dict().items()}
    assert same_bits(run(direct, x), run(twice, x))
    assert distance(run(both.zero_(copy.deepcopy(model)), x), run(twice, x)) <= 1e-10


@every_case
def test_sliced_network_runs_in_training_mode(case: Case) -> None:
    groups = groups_of(case.name)
    model, x = build(case), example(case, batch=4)
    Plan.build(model, groups, random_keep(groups, 0.5)).apply_(model).train()
    outputs = [t for t in tensors_of(model(x)) if t.requires_grad]
    sum(t.square().mean() for t in outputs).backward()
    reference = build(case).train()
    sum(t.square().mean() for t in tensors_of(reference(x)) if t.requires_grad).backward()
    expected = {name for name, p in reference.named_parameters() if p.grad is not None}
    assert {name for name, p in model.named_parameters() if p.grad is not None} == expected
    assert all(p.grad.shape == p.shape and p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
