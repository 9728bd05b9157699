"""The part of a plan that chooses operations: as data, applied, reloaded, and refused on another model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import compress
from compress.errors import PlanError
from compress.modules import choices_of
from compress.surgery import save_model, slice_, with_operations
from helpers.choice_networks import choose, conv_choices

CHOSEN = {"first": "conv1", "second": "conv1", "down": "wide"}


def chosen_plan() -> compress.Plan:
    return compress.Plan({}, {}, choices=dict(CHOSEN))


def test_one_hot_mixture_and_cut_network_agree_to_the_bit() -> None:
    x = torch.randn(3, 3, 8, 8)
    for first in ("conv3", "conv1", "skip"):
        for down in ("conv", "wide"):
            model = conv_choices().eval()
            mixture = choose(conv_choices(), first=first, down=down).eval()  # the second shares the first's scores
            plan = compress.Plan({}, {}, choices={"first": first, "second": first, "down": down})
            assert torch.equal(slice_(model, plan)(x), mixture(x))
            assert not choices_of(model)


def test_cut_leaves_only_the_chosen_tensors() -> None:
    model = slice_(conv_choices(), chosen_plan())
    assert not any("scores" in name or "candidates" in name for name in model.state_dict())
    assert isinstance(model.get_submodule("first"), nn.Sequential)
    assert model.get_parameter("first.0.weight").shape == (8, 8, 1, 1)


def test_plan_survives_its_file_and_plans_without_choices_look_as_before(tmp_path: Path) -> None:
    chosen_plan().save(tmp_path / "plan.json")
    loaded = compress.Plan.load(tmp_path / "plan.json")
    assert loaded.choices == CHOSEN
    assert loaded.digest() == chosen_plan().digest()
    assert "choices" not in compress.Plan({}, {}).to_dict()
    assert repr(loaded).startswith("Plan(3 operations chosen")


def test_operations_then_widths_are_one_plan() -> None:
    model = slice_(conv_choices(), chosen_plan())
    groups = compress.find_groups(model, torch.zeros(1, 3, 8, 8))
    name = next(g.name for g in groups if any(s.tensor == "inner.weight" for s in g.slots))
    widths = compress.Plan.build(model, groups, {name: [0, 3, 5]})
    whole = chosen_plan().then(widths)
    x = torch.randn(2, 3, 8, 8)
    expected = slice_(model, widths).eval()(x)
    assert torch.equal(slice_(conv_choices(), compress.Plan.from_dict(whole.to_dict())).eval()(x), expected)
    with pytest.raises(PlanError, match="choose them before widths are cut"):
        widths.then(chosen_plan())


def test_saved_network_is_reloaded_into_a_fresh_model(tmp_path: Path) -> None:
    model = slice_(conv_choices(1), chosen_plan())
    save_model(model, chosen_plan(), tmp_path)
    again = compress.load(conv_choices(2), tmp_path)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again.eval()(x), model.eval()(x))


def test_with_operations_leaves_the_model_alone() -> None:
    model = conv_choices()
    copied = with_operations(model, chosen_plan())
    assert not choices_of(copied)
    assert len(choices_of(model)) == 3
    assert with_operations(model, compress.Plan({}, {})) is model


def test_plans_of_another_model_are_refused_and_change_nothing() -> None:
    model = conv_choices()
    before = set(model.state_dict())
    for choices, problem in (
        ({**CHOSEN, "nowhere": "conv1"}, "nowhere: expected a Choice with the candidate conv1; the model has none"),
        ({**CHOSEN, "down": "deep"}, "down: expected a candidate deep; its candidates are conv, wide"),
        ({"first": "skip", "second": "skip"}, "down: the plan does not choose a candidate"),
    ):
        with pytest.raises(PlanError, match=problem):
            slice_(model, compress.Plan({}, {}, choices=choices))
    with pytest.raises(PlanError, match=r"the plan rebuilds a network of cells.*got ConvChoices"):
        slice_(model, compress.Plan({}, {}, choices=dict(CHOSEN), network={"cells": 3}))
    with pytest.raises(PlanError, match="a Choice that is the whole model cannot be replaced"):
        slice_(compress.Choice(a=nn.Identity(), b=nn.Identity()), compress.Plan({}, {}, choices={"": "a"}))
    with pytest.raises(PlanError, match="the plan chooses operations: apply it with apply_"):
        chosen_plan().zero_(model)
    assert set(model.state_dict()) == before


@pytest.mark.parametrize(
    ("key", "value"),
    [("choices", {"first": 3}), ("choices", {"first": "a.b"}), ("network", {"cells": {"x": object}}), ("choices", [])],
)
def test_damaged_plan_files_are_refused(key: str, value: object) -> None:
    with pytest.raises(PlanError, match=key):
        compress.Plan.from_dict({**compress.Plan({}, {}).to_dict(), key: value})
