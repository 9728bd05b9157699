"""The charts of costs show their numbers, and say in words what they mean."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from compress.report.charts import render_charts
from compress.report.operation_table import OperationRow
from compress.report.report import Report
from compress.search import CostHistory
from compress.search.cost_history import Losses
from helpers.pages import Document, made_up, svg_of

STEPS = [10, 20, 30, 40]


def history(half: str = "all", last: Any = (0.2, 0.1, -0.1, -0.3), **more: Any) -> CostHistory:
    """Costs of three groups: one above zero, one at zero, and one that changes its sign."""
    costs = {"layer0.conv": [0.4, 0.3, 0.2, 0.1], "layer1.conv": [1e-7, 0.0, -1e-7, 0.0], "layer2.conv": [*last]}
    pull = {name: [0.5] * 4 for name in costs}
    return CostHistory("search", half, STEPS, costs, pull, **more)


def losses() -> dict[str, Losses]:
    everyone = Losses([1.0] * 4, [2.5, 2.0, 1.0, 0.5], [2.0, 1.9, 1.2, 0.8])
    right = Losses([None, 0.5, 0.5, 0.75], [None, 1.0, 0.5, 0.25], [None, 1.9, 1.1, 0.75])
    return {"all": everyone, "right": right, "wrong": Losses([1.0, 0.5, 0.5, 0.25], [2.5, 3, 3, 3], [2, 1.9, 1.2, 0.5])}


def section(*costs: CostHistory, **fields: Any) -> str:
    report = made_up(3, trained=False)
    report.costs = [*costs]
    for name, value in fields.items():
        setattr(report, name, value)
    html = render_charts(report)
    return html[html.index("<h2>Costs") :] if "<h2>Costs" in html else ""


def text_of(html: str) -> str:
    return Document(html).all("p")[0][1]


def filled_areas(svg: str, color: str) -> float:
    """Return the sum of the areas that are filled with a color, in the units of the chart."""
    total, paths = 0.0, dict(re.findall(r'<path id="([^"]*)" d="([^"]*)"', svg))
    for name in re.findall(rf'<use href="#([^"]*)"[^>]*fill: var\(--{color}\)', svg):
        x, y = np.array(re.findall(r"[ML] (\S+) (\S+)", paths[name]), dtype=float).T
        total += abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2
    return total


def test_a_report_without_costs_has_no_section() -> None:
    assert section() == section(CostHistory("search", "all")) == ""


def test_the_text_says_what_the_sign_means_and_when_it_changes() -> None:
    text = text_of(section(history(samples=losses())))
    assert text.startswith("Above zero, the search wants a group smaller; below zero, larger.")
    assert "What the classifier reads costs as much as the loss exceeds the entropy of the predictions." in text
    assert "The last group with a cost, layer2.conv, falls below zero at about step 30." in text
    assert "1 of 3 groups is at zero" in text
    assert "Auxiliary" not in text and "distils" not in text


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ((-0.1, -0.2, -0.1, -0.3), "stays below zero"),
        ((0.1, 0.2, 0.1, 0.3), "stays above zero"),
        ((-0.1, 0.2, 0.1, 0.3), "rises above zero at about step 20"),
        ((0.1, -0.2, 0.1, 0.3), "falls below zero at about step 20, the first of 2 times"),
    ],
)
def test_the_last_group_in_words(last: tuple[float, ...], words: str) -> None:
    assert f"layer2.conv, {words}." in text_of(section(history(last=last)))


def test_the_area_between_loss_and_entropy_is_the_cost_of_what_the_classifier_reads() -> None:
    """Loss minus entropy is 0.5, 0.1, -0.2, -0.3: it crosses zero at a third of the way from step 20 to 30."""
    svg = svg_of(section(history(samples=losses())), "search: loss and entropy")
    above = (0.5 + 0.1) / 2 + 0.1 / 2 / 3
    below = 0.2 / 2 * 2 / 3 + (0.2 + 0.3) / 2
    assert filled_areas(svg, "cut") / filled_areas(svg, "kept") == pytest.approx(above / below, rel=1e-3)
    assert "loss 0.5, entropy 0.8, cost -0.3 at step 40" in svg


def test_right_and_wrong_predictions_are_apart_from_when_there_are_any() -> None:
    html = section(history(samples=losses()))
    right, wrong = (svg_of(html, f"search: {kind} predictions") for kind in ("right", "wrong"))
    assert "cost -0.5 at step 40, 75% of the samples" in right and filled_areas(right, "cut") == 0
    assert "cost 2.5 at step 40, 25% of the samples" in wrong and filled_areas(wrong, "kept") == 0
    none = losses() | {"wrong": Losses([None] * 4, [None] * 4, [None] * 4)}
    assert "wrong predictions" not in section(history(samples=none))


def test_the_whole_is_the_sum_of_the_groups() -> None:
    svg = svg_of(section(history(samples=losses())), "search: costs as a whole")
    assert "loss minus entropy 0.5 to -0.3, sign at step 30; all groups 0.6 to -0.2; " in svg
    assert "the last group 0.2 to -0.3, sign at step 30" in svg
    assert "loss minus entropy" not in svg_of(section(history()), "search: costs as a whole")


def test_each_half_has_its_line_in_the_chart_of_a_group() -> None:
    html = section(history("auxiliary"), history("primary", last=(0.1, 0.1, 0.1, 0.1)))
    svg = svg_of(html, "Cost of layer2.conv: auxiliary 0.2 to -0.3; primary 0.1 to 0.1")
    assert len(re.findall(r"stroke: var\(--(?:more|last)\)", svg)) == 2
    text = text_of(html)
    assert (
        "layer2.conv, falls below zero at about step 30 on the auxiliary half and stays above zero on the primary"
        in text
    )
    assert "Auxiliary is the half of the data on which the kept weights are trained" in text
    assert [key.strip() for _, key in Document(html).all("span", class_="key")] == [
        "wants it smaller", "wants it larger", "auxiliary half", "primary half"
    ]  # fmt: skip


def test_candidates_are_compared_with_their_choice_on_the_half_of_the_scores() -> None:
    candidates = {"layer0.conv": {"conv": [0.1, 0.2, 0.3, 0.4], "skip": [0.5, 0.4, 0.3, 0.2]}}
    auxiliary = CostHistory("operations", "auxiliary", STEPS, {"layer0.conv": [9.0] * 4}, {"layer0.conv": [9.0] * 4})
    auxiliary.candidates = {"layer0.conv": {"conv": [9.0] * 4, "skip": [9.0] * 4}}
    primary = CostHistory("operations", "primary", STEPS, {"layer0.conv": [0.3] * 4}, {"layer0.conv": [0.3] * 4})
    primary.candidates = candidates
    row = OperationRow("layer0.conv", 1, "skip", {"conv": 0.4, "skip": 0.6}, {}, {})
    html = section(auxiliary, primary, operations=[row], recipe={"search": {"method": "darts1"}})
    svg = svg_of(html, "Cost of layer0.conv: 0.3 at step 40; conv 0.4, skip 0.2")
    (chosen,) = re.findall(r'<path d="([^"]*)"[^>]*stroke: var\(--more\)', svg)
    heights = [float(y) for _, y in re.findall(r"[ML] (\S+) (\S+)", chosen)]
    assert heights == sorted(heights)  # down on the page
    assert "a candidate whose cost is below that of the choice (bold) gains weight" in text_of(html)
    free = section(auxiliary, primary, operations=[row], recipe={"search": {"method": "bayesnas"}})
    assert "a candidate whose cost is below zero gains weight" in text_of(free)


def test_distillation_is_said_to_be_part_of_the_costs() -> None:
    assert "The search distils" in text_of(section(history(), recipe={"search": {"distill": {"weight": 1.0}}}))


def test_many_groups_are_thinned_out_and_counted() -> None:
    names = [f"layer{i}.conv" for i in range(40)]
    steps = list(range(1, 104))
    costs = {name: [0.1] * 103 for name in names}
    many = CostHistory("search", "all", steps, costs, costs)
    report = made_up(40, trained=False)
    report.costs = [many]
    html = render_charts(report)
    assert html.count("Cost of layer") == 18 and "Of 40 groups, 18 are shown one by one." in html
    line = re.findall(r'<path d="([^"]*)"[^>]*stroke: var\(--more\)', svg_of(html, "Cost of layer0.conv"))[0]
    assert len(re.findall("[ML]", line)) <= 50


def test_names_are_escaped() -> None:
    hostile = "<script>alert(1)</script>"
    costs = CostHistory("search", "all", STEPS, {hostile: [1.0] * 4}, {hostile: [1.0] * 4})
    html = section(costs)
    assert html and hostile not in html


def test_the_same_report_after_json_draws_the_same_page() -> None:
    report = made_up(3, trained=False)
    report.costs = [history("auxiliary", samples=losses()), history("primary", samples=losses())]
    again = Report.from_dict(json.loads(report.to_json()))
    assert again.costs == report.costs and render_charts(again) == render_charts(report)
