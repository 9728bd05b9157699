"""Order, bounds, table, JSON and page of sensitivities whose numbers are known."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from compress.diagnostics import GroupSensitivity, Measurement, NarrowedWidth, Sensitivity
from compress.recipe import Recipe
from helpers.pages import Document, svg_of

WIDTHS = (0.75, 0.5, 0.25)
HOSTILE = "<b>\x1b[31m"


def measured(accuracy: float) -> Measurement:
    return Measurement(1 - accuracy, {"accuracy": accuracy})


def group(name: str, cut: list[float], repaired: list[float] | None = None, width: int = 64) -> GroupSensitivity:
    """Return a group with these accuracies at 75, 50 and 25 %."""
    points = [
        NarrowedWidth(int(left * width), left, measured(value), None if repaired is None else measured(repaired[i]))
        for i, (left, value) in enumerate(zip(WIDTHS, cut, strict=True))
    ]
    return GroupSensitivity(name, "channels", width, points)


def sensitivity(*groups: GroupSensitivity) -> Sensitivity:
    return Sensitivity(measured(0.9), list(groups), WIDTHS, "magnitude", 8, "Network")


TOUGH = group("tough", [0.9, 0.9, 0.89])
STEEP = group("steep", [0.89, 0.7, 0.1])
BROKEN = group("1", [0.5, 0.9, 0.9])  # its name reads as a number
LOST = group("lost", [0.9, math.nan, 0.9])


def test_groups_are_in_order_of_the_mean_increase_of_the_loss() -> None:
    found = sensitivity(TOUGH, STEEP, BROKEN, LOST)
    assert [g.name for g in found] == ["lost", "steep", "1", "tough"]
    assert found.fragility(STEEP) == pytest.approx((0.01 + 0.2 + 0.8) / 3)
    assert found.fragility(LOST) == math.inf
    assert repr(found) == "Sensitivity(4 groups; the most fragile: lost, steep, 1)"
    with pytest.raises(KeyError, match="no group named 'none' was narrowed; there are lost, steep, 1, tough"):
        found["none"]


def test_bounds_are_the_narrowest_widths_within_the_loss() -> None:
    text = sensitivity(TOUGH, STEEP, BROKEN, LOST).bounds("2%")
    recipe = Recipe.load(yaml.safe_load(text) | {"budget": "50%"})
    least = {name: bound.least for name, bound in recipe.target.bounds.items()}
    assert least == {"lost": 48, "steep": 48, "1": 64}  # a width below one that loses too much does not count
    assert "steep: {least: 48}  # of 64; 70.00 % at 32\n" in text
    assert text.startswith("# Each of these groups alone loses more than 2.00 % of accuracy below its bound (ranked")


def test_bounds_loosen_with_what_may_be_lost_and_after_repair() -> None:
    found = sensitivity(group("steep", [0.89, 0.7, 0.1], [0.9, 0.9, 0.5]), group("tough", [0.9] * 3, [0.9] * 3))
    least = {
        lost: yaml.safe_load(found.bounds(lost))["target"]["bounds"]["steep"]["least"] for lost in (0, "1%", 0.3, "79%")
    }
    assert least == {0: 64, "1%": 48, 0.3: 32, "79%": 32}
    assert yaml.safe_load(found.bounds("2%", repaired=True)) == {"target": {"bounds": {"steep": {"least": 32}}}}
    nothing = found.bounds("80%")
    assert yaml.safe_load(nothing) is None
    assert "no bounds" in nothing


@pytest.mark.parametrize("name", ["1", "null", "layers.0", "a b", "yes", HOSTILE, "x" * 200, "stage1.conv+"])
def test_names_of_groups_stay_names(name: str) -> None:
    """A key is read from the text as it was, whatever YAML makes of numbers, words and control characters."""
    text = sensitivity(group(name, [0.5, 0.5, 0.5])).bounds()
    assert yaml.safe_load(text) == {"target": {"bounds": {name: {"least": 64}}}}
    assert "\x1b" not in text


def test_metric_that_is_no_fraction_is_compared_in_its_own_unit() -> None:
    def at(width: int, value: float) -> NarrowedWidth:
        return NarrowedWidth(width, 1.0, Measurement(1.0, {"mAP": value}))

    points = [GroupSensitivity("a", "channels", 64, [at(48, 39.0), at(32, 36.0)])]
    found = Sensitivity(Measurement(1.0, {"mAP": 40.0}), points, (0.75, 0.5), "magnitude", 1, "Network")
    text = found.bounds(2)
    assert "loses more than 2 of mAP below" in text
    assert yaml.safe_load(text)["target"]["bounds"] == {"a": {"least": 48}}


def test_without_a_metric_bounds_compare_the_loss_with_that_of_the_dense_network() -> None:
    def at(loss: float) -> NarrowedWidth:
        return NarrowedWidth(32, 0.5, Measurement(loss))

    groups = [GroupSensitivity(name, "mlp", 64, [at(loss)]) for name, loss in (("a", 2.1), ("b", 2.3))]
    found = Sensitivity(Measurement(2.0), groups, (0.5,), "magnitude", 1, "Network")
    assert yaml.safe_load(found.bounds("10%"))["target"]["bounds"] == {"b": {"least": 64}}
    assert found.rows() == [["b", "mlp", "64", "2.3"], ["a", "mlp", "64", "2.1"]]


@pytest.mark.parametrize("wrong", ["much", -0.1, math.nan, math.inf])
def test_loss_that_is_no_fraction_is_explained(wrong: float | str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'lost: expected what may be lost, as 0.02 or "2%"; got'):
        sensitivity(TOUGH).bounds(wrong)
    with pytest.raises(ValueError, match="lost: expected"):
        sensitivity(TOUGH).save(tmp_path / "out", wrong)
    assert not (tmp_path / "out").exists()


def test_bounds_after_repair_need_a_repair() -> None:
    with pytest.raises(ValueError, match=r"bounds: nothing was repaired; measure with repair=True"):
        sensitivity(TOUGH).bounds(repaired=True)


def test_json_is_strict_and_has_every_number() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = sensitivity(LOST, group("fixed", [0.8, 0.7, 0.6], [0.9, 0.89, 0.88]))
    data = json.loads(found.to_json(), parse_constant=refuse)
    assert (data["search"], data["batches"], data["model"], data["metric"]) == ("magnitude", 8, "Network", "accuracy")
    assert data["widths"] == [0.75, 0.5, 0.25]
    lost, fixed = data["groups"]
    assert lost["fragility"] is None and lost["points"][1]["cut"] == {"loss": None, "metrics": {"accuracy": None}}
    assert [point["repaired"]["metrics"]["accuracy"] for point in fixed["points"]] == [0.9, 0.89, 0.88]
    assert [(point["width"], point["macs_left"]) for point in fixed["points"]] == [(48, 0.75), (32, 0.5), (16, 0.25)]


def test_table_shows_before_and_after_repair_and_no_control_characters() -> None:
    found = sensitivity(group(HOSTILE, [0.8, 0.7, 0.6], [0.9, 0.89, 0.88]))
    stream = io.StringIO()
    Console(file=stream, width=140).print(found)
    text = stream.getvalue()
    assert "80.00 -> 90.00 %" in text and "60.00 -> 88.00 %" in text
    assert "sensitivity: accuracy, dense 90.00 %" in text
    assert "\x1b[31m" not in text


def test_page_draws_the_fragile_group_first_and_escapes_names(tmp_path: Path) -> None:
    found = sensitivity(group(HOSTILE, [0.9, 0.9, 0.8], [0.9, 0.9, 0.89]), STEEP)
    found.save(tmp_path / "out", "1%")
    page = (tmp_path / "out" / "sensitivity.html").read_text()
    document = Document(page)
    labels = [attrs["aria-label"] for attrs, _ in document.all("svg")]
    assert labels[0] == "accuracy with a part of steep: 100% 0.9, 75% 0.89, 50% 0.7, 25% 0.1"
    assert labels[1].endswith("75% 0.9 (repaired 0.9), 50% 0.9 (repaired 0.9), 25% 0.8 (repaired 0.89)")
    assert "<b>\x1b" not in page and "nan" not in page
    heights = svg_of(page, "accuracy with a part of steep").count("<use")
    assert heights >= 4  # a marker for each width
    assert "steep: {least: 48}" in page
    assert "steep: {least: 64}  # of 64; it does not run at 48" in page  # after repair, of which there is no number
    assert json.loads((tmp_path / "out" / "sensitivity.json").read_text()) == found.to_dict()


def test_page_of_many_groups_has_charts_of_the_fragile_ones_and_a_complete_table(tmp_path: Path) -> None:
    found = sensitivity(*(group(f"layer{i}", [0.9, 0.9, 0.9 - i / 1000]) for i in range(50)))
    (tmp_path / ".sensitivity.html.a1b2_c3d").write_text("left by a process that was killed")
    found.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sensitivity.html", "sensitivity.json"]
    page = (tmp_path / "sensitivity.html").read_text()
    assert page.count("<svg") == 40
    assert "The charts show the first 40 of 50 groups." in page
    assert page.count("<td>layer") == 50
