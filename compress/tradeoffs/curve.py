"""Curve: the pruned networks of several budgets, their costs and metrics, the knee, and the choice of one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compress.api import Pruned
from compress.errors import BudgetError
from compress.formatting import format_count, format_metric, printable
from compress.pipeline import FEWEST_EXAMPLES
from compress.recipe import Budget, parse_allowed_loss, read_budget
from compress.report import NetworkNumbers

NOT_MEASURED = (
    "there are no validation data, and agreement with the dense network needs outputs with classes, and calibration "
    f"data, training data or {FEWEST_EXAMPLES} example inputs"
)


@dataclass(repr=False)
class Point(Pruned):
    """The network that one budget leaves; `save` writes it as `compress.prune` would have."""

    budget: Budget

    @property
    def numbers(self) -> NetworkNumbers:
        """Size, metrics and latency of this network."""
        return self.report.pruned

    @property
    def latency_left(self) -> float | None:
        """Latency as a fraction of the dense network's, timed in turn with it; None if it was not timed."""
        dense, pruned = self.report.dense.latency_ms, self.report.pruned.latency_ms
        return pruned / dense if dense and pruned is not None else None


class Curve:
    """Accuracy against cost: iterate over its points, take one with `curve[0.6]`, choose one with `pick`.

    Attributes:
        points: from the largest network to the smallest.
        dense: size, metrics and latency of the dense network.
        unit: in which a bare number, such as that of `curve[0.6]`, is a budget.
        notes: how the curve was made.
    """

    def __init__(self, points: Sequence[Point], unit: str, notes: Sequence[str] = ()) -> None:
        self.points = sorted(points, key=lambda point: (-point.numbers.macs, -point.numbers.params))
        self.unit, self.notes = unit, list(notes)
        self.dense = self.points[0].report.dense

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, budget: float | str | dict[str, Any] | Budget) -> Point:
        wanted = read_budget(budget, self.unit)
        for point in self.points:
            if point.budget == wanted:
                return point
        known = "; ".join(str(point.budget) for point in self.points)
        raise KeyError(f"no point has the budget {wanted}; the curve has {known}")

    def __repr__(self) -> str:
        values = ", ".join(f"{point.budget}: {self._format(point.numbers)}" for point in self.points)
        return f"Curve({self.metric or 'no metric'} {self._format(self.dense)} dense; {values})"

    @property
    def metric(self) -> str | None:
        """Name of the first metric of the networks, larger is better; None if nothing was measured."""
        return next(iter(self.points[0].numbers.metrics), None)

    def value(self, numbers: NetworkNumbers) -> float:
        """Return the curve's metric of a network; NaN if it was not measured."""
        return numbers.metrics.get(self.metric, math.nan) if self.metric is not None else math.nan

    @property
    def knee(self) -> Point | None:
        """Point beyond which the metric falls fastest: the farthest above the line from the dense to the smallest.

        MACs and metric are scaled to 0 to 1. None if no point is above the line, or nothing was measured.
        """
        ends = (self.points[-1].numbers, self.dense)
        (x0, y0), (x1, y1) = ((float(n.macs), self.value(n)) for n in ends)
        if not (x1 > x0 and y1 > y0):  # also false for NaN
            return None
        above = [(self.value(p.numbers) - y0) / (y1 - y0) - (p.numbers.macs - x0) / (x1 - x0) for p in self.points]
        best = max(range(len(above)), key=lambda i: above[i])
        return self.points[best] if above[best] > 1e-9 else None

    def pick(self, loss: float | str) -> Point:
        """Return the smallest network that loses at most so much of the metric: "1%" is one point of accuracy.

        Raises:
            ValueError: `loss` is not a number or a percentage.
            BudgetError: no network loses so little.
        """
        allowed = parse_allowed_loss(loss, "pick")
        if allowed >= 1 and 0 <= self.value(self.dense) <= 1 and "%" not in str(loss):
            raise ValueError(
                f'pick: expected what may be lost, as 0.01 or "1%"; got {loss!r}, more than all of the {self.metric}. '
                f'Did you mean "{allowed:g}%"?'
            )
        if self.metric is None:
            raise BudgetError(f"pick: nothing was measured: {NOT_MEASURED}. Give val=LOADER, or --data in a shell")
        good = [p for p in self.points if self.value(self.dense) - self.value(p.numbers) <= allowed + 1e-12]
        if good:
            return good[-1]
        best = max(self.points, key=lambda p: self.value(p.numbers))
        lost = self.value(self.dense) - self.value(best.numbers)
        raise BudgetError(
            f"pick: no network loses at most {loss} of {self.metric}; the best, {best.budget}, loses {lost:.2%}. Ask "
            "for larger budgets, or fine-tune for longer"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the curve as JSON data, without the networks."""
        knee = self.knee
        return {
            "metric": self.metric,
            "dense": asdict(self.dense),
            "points": [
                {
                    "budget": point.budget.model_dump(mode="json", exclude_none=True),
                    **asdict(point.numbers),
                    "macs_left": point.numbers.macs / max(self.dense.macs, 1),
                    "params_left": point.numbers.params / max(self.dense.params, 1),
                    "latency_left": point.latency_left,
                    "after_cut": point.report.sliced,
                }
                for point in self.points
            ],
            "knee": None if knee is None else knee.budget.model_dump(mode="json", exclude_none=True),
            "notes": self.notes,
        }

    def to_json(self) -> str:
        """Return the text of tradeoff.json."""
        return json.dumps(self.to_dict(), indent=1)

    def rows(self) -> list[list[str]]:
        """Return the cells of the table: the dense network, then the points."""
        rows, knee = [], self.knee
        for point in (None, *self.points):
            numbers = self.dense if point is None else point.numbers
            after_cut = "" if point is None else self._after_cut(point)
            latency = "-"
            if numbers.latency_ms is not None:
                latency = f"{numbers.latency_ms:.3g} ms"
            if point is not None and point.latency_left is not None:
                latency += f" ({point.latency_left:.0%})"
            name = "dense" if point is None else f"{point.budget}{', knee' * (point is knee)}"
            lost = (
                "" if point is None else format_metric(self.metric or "", self.value(self.dense) - self.value(numbers))
            )
            cells = [name, self._format(numbers), "" if "nan" in lost else lost, *([after_cut] * self._is_tuned)]
            cells += [
                f"{format_count(count)} ({count / max(of, 1):.0%})"
                for count, of in ((numbers.macs, self.dense.macs), (numbers.params, self.dense.params))
            ]
            rows.append([*cells, latency])
        return rows

    @property
    def headers(self) -> list[str]:
        """Titles of the table's columns."""
        after_cut = ["after cut"] * self._is_tuned
        return ["budget", self.metric or "metric", "lost", *after_cut, "MACs", "parameters", "latency"]

    def __rich__(self) -> Table:
        table = Table(title="trade-off", title_justify="left", caption=printable("; ".join(self.notes)) or None)
        for i, header in enumerate(self.headers):
            table.add_column(header, justify="left" if i == 0 else "right", no_wrap=i == 1)
        for row in self.rows():
            table.add_row(*(Text(printable(cell)) for cell in row))
        return table

    def show(self) -> None:
        """Print the table to the terminal."""
        Console().print(self)

    @property
    def _is_tuned(self) -> bool:
        """Return whether some network was trained after the cut, and its metric is another."""
        return any(map(self._after_cut, self.points))

    def _after_cut(self, point: Point) -> str:
        value = point.report.sliced.get(self.metric or "")
        tuned = value is not None and value != self.value(point.numbers)
        return format_metric(self.metric or "", value) if tuned and value is not None else ""

    def _format(self, numbers: NetworkNumbers) -> str:
        value = self.value(numbers)
        return "-" if math.isnan(value) else format_metric(self.metric or "", value)
