"""Sensitivity: loss and metrics of a network as each group alone is narrowed, and bounds that follow from them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compress.formatting import format_metric, format_percent, printable
from compress.recipe import parse_allowed_loss
from compress.report import CurveOfGroup, SensitivityPage
from compress.storage import remove_temporary_files, write_atomic

from .measurement import Measurement
from .suggested_bounds import SuggestedBound, recipe_text

JSON_FILE, PAGE_FILE = "sensitivity.json", "sensitivity.html"


@dataclass(frozen=True)
class NarrowedWidth:
    """The network with one group at one width: right after the cut and, if it was measured, after repair."""

    width: int
    macs_left: float  # fraction of the network's MACs
    cut: Measurement
    repaired: Measurement | None = None


@dataclass(frozen=True)
class GroupSensitivity:
    """A group at several widths, from wide to narrow."""

    name: str
    kind: str
    width: int
    points: list[NarrowedWidth]

    def near(self, fraction: float) -> NarrowedWidth:
        """Return the point whose width is next to a fraction of the group's width."""
        return min(self.points, key=lambda point: abs(point.width / self.width - fraction))


@dataclass(repr=False)
class Sensitivity:
    """Loss and metrics as each group alone is narrowed; iterate over its groups, the most fragile first.

    Attributes:
        dense: the network as it is.
        groups: the most fragile first, by the mean increase of the loss right after the cut.
        widths: the fractions of each group's width that were asked for.
        search: the search that ranked the dimensions within each group.
        batches: number of batches that each point was measured on.
        model: name of the model's class.
        notes: what to know about the measurement.
    """

    dense: Measurement
    groups: list[GroupSensitivity]
    widths: tuple[float, ...]
    search: str
    batches: int
    model: str
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = sorted(self.groups, key=lambda group: -self.fragility(group))

    def __iter__(self) -> Iterator[GroupSensitivity]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, name: str) -> GroupSensitivity:
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(f"no group named {name!r} was narrowed; there are {', '.join(g.name for g in self.groups)}")

    def __repr__(self) -> str:
        fragile = ", ".join(group.name for group in self.groups[:3])
        return f"Sensitivity({len(self)} groups; the most fragile: {fragile})"

    @property
    def metric(self) -> str | None:
        """Name of the first metric of the task, larger is better; None if there is only the loss."""
        return next(iter(self.dense.metrics), None)

    @property
    def is_repaired(self) -> bool:
        """Return whether the network was measured after repair as well."""
        return any(point.repaired is not None for group in self.groups for point in group.points)

    def fragility(self, group: GroupSensitivity) -> float:
        """Return the mean increase of the loss over the widths of a group; infinity if a loss is not finite."""
        losses = [point.cut.loss - self.dense.loss for point in group.points]
        return sum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.inf

    def value(self, measurement: Measurement | None) -> float:
        """Return the metric of a measurement, or its loss if there is no metric; NaN without a measurement."""
        if measurement is None:
            return math.nan
        return measurement.loss if self.metric is None else measurement.metrics.get(self.metric, math.nan)

    def bounds(self, lost: float | str = "2%", *, repaired: bool = False) -> str:
        """Return bounds as text for a recipe: each group alone loses at most so much of the metric.

        A group's bound is the narrowest measured width down to which no wider one loses more. A group that may have the
        narrowest width of all gets no bound, and one that loses more at every width stays whole.

        Args:
            lost: "2%" is 0.02, two points of accuracy; without a metric, a fraction of the dense network's loss.
            repaired: compare the networks after repair, for a recipe with `compensate: least_squares`.

        Raises:
            ValueError: `lost` is not a fraction, or nothing was repaired.
        """
        allowed = parse_allowed_loss(lost, "lost")
        if repaired and not self.is_repaired:
            raise ValueError("bounds: nothing was repaired; measure with repair=True, or leave repaired=True out")
        limit = f"{format_percent(allowed)} of the loss"
        if self.metric is not None:
            limit = f"{format_metric(self.metric, allowed)} of {self.metric}"
        limit += " after repair" * repaired
        suggested = []
        for group in self.groups:
            good, worse = self._split_by_loss(group, allowed, repaired)
            if worse is not None:
                measured = worse.repaired if repaired else worse.cut
                value = "it does not run" if measured is None else self._format(measured)
                least = group.width if good is None else good.width
                suggested.append(SuggestedBound(group.name, least, group.width, worse.width, value))
        return recipe_text(suggested, limit, self._measured_on)

    def _split_by_loss(
        self, group: GroupSensitivity, allowed: float, repaired: bool
    ) -> tuple[NarrowedWidth | None, NarrowedWidth | None]:
        """Return the narrowest width that is good enough and the first that is not, as far as there are."""
        good = None
        for point in group.points:
            value, dense = self.value(point.repaired if repaired else point.cut), self.value(self.dense)
            lost = (value - dense) / abs(dense or 1.0) if self.metric is None else dense - value
            if not lost <= allowed + 1e-12:  # also for NaN
                return good, point
            good = point
        return good, None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON data; numbers that are not finite are null."""
        return {
            "model": self.model,
            "search": self.search,
            "batches": self.batches,
            "metric": self.metric,
            "widths": list(self.widths),
            "dense": _measurement_data(self.dense),
            "groups": [
                {
                    "name": group.name,
                    "kind": group.kind,
                    "width": group.width,
                    "fragility": _finite(self.fragility(group)),
                    "points": [
                        {
                            "width": point.width,
                            "macs_left": point.macs_left,
                            "cut": _measurement_data(point.cut),
                            "repaired": None if point.repaired is None else _measurement_data(point.repaired),
                        }
                        for point in group.points
                    ],
                }
                for group in self.groups
            ],
            "notes": self.notes,
        }

    def to_json(self) -> str:
        """Return the text of sensitivity.json."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @property
    def headers(self) -> list[str]:
        """Titles of the table's columns."""
        return ["group", "kind", "width", *(format_percent(fraction) for fraction in self.widths)]

    def rows(self) -> list[list[str]]:
        """Return the cells of the table, group by group; `a -> b` is before and after repair."""
        return [
            [group.name, group.kind, str(group.width), *(self._cell(group.near(fraction)) for fraction in self.widths)]
            for group in self.groups
        ]

    def _cell(self, point: NarrowedWidth) -> str:
        cut, repaired = self._format(point.cut), point.repaired
        return cut if repaired is None else f"{cut.removesuffix(' %')} -> {self._format(repaired)}"

    def _format(self, measurement: Measurement) -> str:
        value = self.value(measurement)
        return "not finite" if math.isnan(value) else format_metric(self.metric or "loss", value)

    @property
    def title(self) -> str:
        """Name of the measurement with the value of the dense network."""
        return f"sensitivity: {self.metric or 'loss'}, dense {self._format(self.dense)}"

    @property
    def _measured_on(self) -> str:
        return f"ranked by {self.search}, {self.batches} batch{'es' * (self.batches != 1)}"

    @property
    def _remarks(self) -> list[str]:
        return [self._measured_on, *["a -> b: before and after repair"] * self.is_repaired, *self.notes]

    def __rich__(self) -> Table:
        table = Table(title=self.title, title_justify="left", caption=printable("; ".join(self._remarks)))
        for i, header in enumerate(self.headers):
            table.add_column(header, justify="right" if i > 1 else "left", overflow="fold")
        for row in self.rows():
            table.add_row(*(Text(printable(cell)) for cell in row))
        return table

    def show(self) -> None:
        """Print the table to the terminal."""
        Console().print(self)

    def save(self, folder: str | Path, lost: float | str = "2%") -> None:
        """Write sensitivity.json and sensitivity.html, with the bounds of this loss, to a folder.

        Raises:
            ValueError: `lost` is not a fraction.
            OSError: a file cannot be written.
        """
        page = self._page(lost).render()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        remove_temporary_files(folder)
        write_atomic(folder / JSON_FILE, self.to_json().encode())
        write_atomic(folder / PAGE_FILE, page.encode())

    def _page(self, lost: float | str) -> SensitivityPage:
        curves = [
            CurveOfGroup(
                group.name,
                [1.0, *(point.width / group.width for point in group.points)],
                [self.value(self.dense), *(self.value(point.cut) for point in group.points)],
                [math.nan, *(self.value(point.repaired) for point in group.points)],
            )
            for group in self.groups
        ]
        return SensitivityPage(
            title=f"Sensitivity of {self.model}",
            metric=self.metric or "loss",
            dense=self.value(self.dense),
            curves=curves,
            widths=sorted({1.0, *self.widths}, reverse=True),
            headers=self.headers,
            rows=self.rows(),
            notes=[self.title, *self._remarks],
            bounds="\n".join(self.bounds(lost, repaired=repaired) for repaired in (False, *[True] * self.is_repaired)),
        )


def _measurement_data(measurement: Measurement) -> dict[str, Any]:
    metrics = {name: _finite(value) for name, value in measurement.metrics.items()}
    return {"loss": _finite(measurement.loss), "metrics": metrics}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
