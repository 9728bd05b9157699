"""The knee and the choice of a network, on curves whose answers are known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

from compress import BudgetError
from compress.recipe import Budget
from compress.report import NetworkNumbers, Report
from compress.surgery import Plan
from compress.tradeoffs import Curve, Point
from compress.tradeoffs.page import render_curve


def curve(values: dict[int, float], metric: str | None = "accuracy", dense: float = 0.95) -> Curve:
    """Return a curve of a network with 100 MACs; the keys are percentages."""

    def numbers(left: int, value: float) -> NetworkNumbers:
        return NetworkNumbers(10 * left, left, {} if metric is None else {metric: value}, left / 10, 0.1)

    points = [
        Point(
            nn.Identity(),
            Plan({}, {}),
            Report(numbers(100, dense), numbers(left, value), [], []),
            Budget.model_validate({"macs": f"{left}%"}),
        )
        for left, value in values.items()
    ]
    return Curve(points, "macs")


GENTLE = {20: 0.30, 80: 0.945, 40: 0.90, 60: 0.94}


def test_knee_is_the_corner_of_a_curve_with_a_corner() -> None:
    knee = curve(GENTLE).knee
    assert knee is not None
    assert knee.budget.macs == 0.4


@pytest.mark.parametrize("values", [{80: 0.76, 60: 0.57, 40: 0.38}, {80: 0.5, 40: 0.45}, {50: 0.96}, {50: 0.9}])
def test_straight_sagging_rising_and_single_curves_have_no_knee(values: dict[int, float]) -> None:
    assert curve(values).knee is None


def test_smallest_network_within_the_loss_is_picked() -> None:
    points = curve(GENTLE)
    for loss, left in (("1%", 0.6), (0.01, 0.6), ("5 %", 0.4), ("0.5%", 0.8), ("100%", 0.2)):
        assert points.pick(loss).budget.macs == left
    with pytest.raises(BudgetError, match=r"loses at most 0\.1% of accuracy; the best, macs 80%, loses 0\.50%"):
        points.pick("0.1%")
    with pytest.raises(
        BudgetError, match=r"nothing was measured: there are no validation data.*16 example inputs. Give val=LOADER"
    ):
        curve(GENTLE, None).pick("1%")
    for points_of_accuracy in (1, "1"):  # a percentage without its sign: every network would be good enough
        with pytest.raises(ValueError, match=r'more than all of the accuracy\. Did you mean "1%"'):
            points.pick(points_of_accuracy)
    assert curve({80: 1.2, 40: 1.1}, "energy", 2.0).pick(1).budget.macs == 0.4
    for wrong in ("much", -1, "nan"):
        with pytest.raises(ValueError, match="pick: expected what may be lost"):
            points.pick(wrong)


def test_points_are_taken_by_their_budget() -> None:
    points = curve(GENTLE)
    assert [p.budget.macs for p in points] == [0.8, 0.6, 0.4, 0.2]
    for key in (0.6, "60%", {"macs": 0.6}, Budget(macs=0.6)):
        assert points[key].numbers.params == 600  # type: ignore[index]
    with pytest.raises(KeyError, match=r"no point has the budget macs 55%; the curve has macs 80%; macs 60%"):
        points["55%"]


def test_json_has_costs_metrics_and_the_knee() -> None:
    data: dict[str, Any] = json.loads(curve(GENTLE).to_json())
    assert data["knee"] == {"macs": 0.4}
    assert [(p["macs_left"], p["latency_left"], p["metrics"]["accuracy"]) for p in data["points"]] == [
        (left / 100, left / 100, GENTLE[left]) for left in (80, 60, 40, 20)
    ]


def test_table_marks_the_knee_and_page_has_a_chart_for_each_cost() -> None:
    points = curve(GENTLE)
    assert [row[0] for row in points.rows() if "knee" in row[0]] == ["macs 40%, knee"]
    page = render_curve(points)
    assert page.count("<svg") == 3
    for cost in ("MACs", "parameters", "latency"):
        assert f"accuracy against {cost}: dense: 100% of the {cost}, 0.95; macs 80%: 80% of the {cost}" in page
    assert "nan" not in page
    assert [row[2] for row in points.rows()] == ["", "0.50 %", "1.00 %", "5.00 %", "65.00 %"]  # lost, like the accuracy
    assert render_curve(curve(GENTLE, None)).count("<svg") == 0


def test_chart_and_table_have_the_same_latencies_left() -> None:
    points = curve(GENTLE)
    points["40%"].report.dense.latency_ms = 16.0  # timed in turn with this network, when the machine was slower
    assert [row[-1] for row in points.rows()] == ["10 ms", "8 ms (80%)", "6 ms (60%)", "4 ms (25%)", "2 ms (20%)"]
    assert "macs 40%: 25% of the latency" in render_curve(points)
    points["60%"].report.pruned.latency_ms = None
    assert "against latency" not in render_curve(points)
