"""The plan that is applied is verified: groups at fault are refused, and the budget is met without them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.budget import CandidateDoesNotRun
from compress.pipeline import choose_exact_plan


class WrongAtOneWidth(nn.Module):
    """Computes something else, or does not run, if one layer has exactly this width."""

    def __init__(self, width: int, fails: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width, self.fails = str(width), fails  # as text: nothing follows it
        self.first, self.second, self.last = nn.Linear(8, 32), nn.Linear(32, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        if h.shape[1] == int(self.width):
            if self.fails:
                raise RuntimeError("kernel is not available for this width")
            h = 1.01 * h
        out: Tensor = self.last(self.second(h).relu())
        return out


def chosen_width(model: nn.Module, recipe: dict[str, Any]) -> int:
    preview = compress.preview(model, recipe, example_inputs=torch.randn(2, 8))
    return next(row.kept for row in preview.report.groups if row.name == "first")


RECIPE: dict[str, Any] = {"budget": {"macs": "60%"}, "search": {"method": "magnitude"}, "timing": {"repeats": 3}}


@pytest.mark.parametrize("fails", [False, True])
def test_group_that_is_wrong_at_its_chosen_width_is_refused_and_the_budget_is_met(fails: bool) -> None:
    width = chosen_width(WrongAtOneWidth(-1, fails), RECIPE)
    assert 16 <= width < 32  # none of the widths at which groups are verified at the start
    model = WrongAtOneWidth(width, fails)
    x = torch.randn(16, 8)
    pruned = compress.prune(model, RECIPE, example_inputs=x, quiet=True)
    assert pruned.model.first.out_features == 32 and "first" not in pruned.plan.keep  # type: ignore[union-attr]
    assert len(pruned.plan.keep["second"]) < 24
    assert pruned.report.pruned.macs <= 0.6 * pruned.report.dense.macs
    (note,) = [note for note in pruned.report.notes if note.startswith("first stays whole: at the chosen widths")]
    assert ("kernel is not available" if fails else "zeroed and sliced outputs differ") in note
    with torch.no_grad():
        zeroed = pruned.plan.zero_(copy.deepcopy(model))(x)
        assert torch.allclose(pruned.model(x), zeroed, atol=1e-5)


def test_tradeoff_verifies_the_plan_of_each_budget() -> None:
    width = chosen_width(WrongAtOneWidth(-1, True), RECIPE)
    model, x = WrongAtOneWidth(width, True), torch.randn(16, 8)
    curve = compress.tradeoff(model, RECIPE, ["90%", "60%", "40%"], example_inputs=x, quiet=True)
    for point in curve:
        is_refused = "first" not in point.plan.keep
        assert is_refused == (point.budget.macs == 0.6)
        assert is_refused == any(note.startswith("first stays whole") for note in point.report.notes)
        assert point.report.pruned.macs <= point.budget.macs * curve.dense.macs
        with torch.no_grad():
            zeroed = point.plan.zero_(copy.deepcopy(model))(x)
            assert torch.allclose(point.model(x), zeroed, atol=1e-5)


def test_preview_and_session_verify_the_plan_as_well() -> None:
    width = chosen_width(WrongAtOneWidth(-1, True), RECIPE)
    model = WrongAtOneWidth(width, True)
    preview = compress.preview(model, RECIPE, example_inputs=torch.randn(2, 8))
    assert preview.reachable and any(note.startswith("first stays whole") for note in preview.report.notes)
    data = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(4, (32,))), batch_size=8)
    recipe = {**RECIPE, "search": {"method": "taylor", "epochs": 1, "ranking": "group"}}
    session = compress.search_session(WrongAtOneWidth(-1, True), recipe, train=data)
    for batch in data:
        session.step(batch)
    chosen = len(session.finish().plan.keep["first"])
    session = compress.search_session(WrongAtOneWidth(chosen, True), recipe, train=data)
    for batch in data:
        session.step(batch)
    assert session.finish().model.first.out_features == 32  # type: ignore[union-attr]


def test_network_that_does_not_run_when_it_is_timed_on_the_way_is_refused_as_well() -> None:
    model = WrongAtOneWidth(20, fails=True).eval()
    groups = compress.find_groups(model, torch.randn(2, 8))
    assert [g.name for g in groups] == ["first", "second"]

    def choose() -> dict[str, np.ndarray]:
        if "first" in [g.name for g in groups]:
            plan = compress.Plan.build(model, groups, {"first": np.arange(20)})
            raise CandidateDoesNotRun("timing.batch_size: the model does not run", plan)
        return {"second": np.arange(5)}

    plan, keep, notes = choose_exact_plan(model, groups, choose)
    assert plan.keep == {"second": [0, 1, 2, 3, 4]} and keep.keys() == {"second"}
    assert len(notes) == 1 and notes[0].startswith("first stays whole: at the chosen widths the code of the model")


def test_network_that_cannot_be_timed_for_another_reason_is_an_error() -> None:
    model = WrongAtOneWidth(-1, fails=True).eval()
    groups = compress.find_groups(model, torch.randn(2, 8))

    def choose() -> dict[str, np.ndarray]:
        raise CandidateDoesNotRun("out of memory", compress.Plan.build(model, groups, {"first": np.arange(20)}))

    with pytest.raises(CandidateDoesNotRun, match="out of memory"):
        choose_exact_plan(model, groups, choose)


def test_budget_that_cannot_be_met_without_the_refused_group_says_so() -> None:
    recipe = {**RECIPE, "budget": {"macs": "20%"}}
    model = WrongAtOneWidth(chosen_width(WrongAtOneWidth(-1, False), recipe), False)
    with pytest.raises(compress.BudgetError, match=r"cannot be reached.*zeroed and sliced outputs differ"):
        compress.prune(model, recipe, example_inputs=torch.randn(4, 8), quiet=True)


@pytest.mark.parametrize("pattern", ["first", "re:fir.*"])
def test_bounds_of_a_group_that_is_refused_at_its_chosen_width_do_not_end_the_run(pattern: str) -> None:
    recipe = {**RECIPE, "target": {"bounds": {pattern: {"least": 21, "most": 21}}}}
    pruned = compress.prune(WrongAtOneWidth(21, True), recipe, example_inputs=torch.randn(4, 8), quiet=True)
    assert pruned.plan.keep.keys() == {"second"} and pruned.report.pruned.macs <= 0.6 * pruned.report.dense.macs
    assert any(note.startswith("first stays whole: at the chosen widths") for note in pruned.report.notes)
