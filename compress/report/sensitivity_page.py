"""The HTML page of a sensitivity: a small chart for each group, the most fragile first, and the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from compress.formatting import FRACTION_METRICS

from .page import details_block, html_document, html_table
from .svg import CUT, INK, KEPT, chart_section, chart_style, inline_svg, new_figure, set_ticks

MOST_CHARTS = 40  # the table has all groups


@dataclass(frozen=True)
class CurveOfGroup:
    """Values of a network as one group is narrowed; NaN where nothing was measured."""

    name: str
    left: Sequence[float]  # of the group's width, from 1 down
    cut: Sequence[float]
    repaired: Sequence[float]


@dataclass(frozen=True)
class SensitivityPage:
    """Content of the page.

    Attributes:
        metric: what the values are; `loss` if the task has no metric.
        dense: value of the dense network.
        curves: of the groups, the most fragile first.
        widths: the fractions of the groups' widths that were asked for.
        bounds: text that the user may copy into a recipe.
    """

    title: str
    metric: str
    dense: float
    curves: Sequence[CurveOfGroup]
    widths: Sequence[float]
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    bounds: str

    def render(self) -> str:
        """Return one HTML document, which loads nothing from elsewhere."""
        body = f"<h1>{escape(self.title)}</h1>\n<p>{escape('; '.join(self.notes))}</p>\n"
        with chart_style():
            charts = [self._chart(i, curve) for i, curve in enumerate(self.curves[:MOST_CHARTS])]
        legend = {"dense": INK, "after the cut": CUT}
        if any(math.isfinite(value) for curve in self.curves for value in curve.repaired):
            legend["after repair"] = KEPT
        text = "One group is narrowed, all others stay whole. The most fragile group is the first."
        if len(self.curves) > MOST_CHARTS:
            text += f" The charts show the first {MOST_CHARTS} of {len(self.curves)} groups."
        title = f"{self.metric[:1].upper()}{self.metric[1:]} against the width of a group"
        body += chart_section(escape(title), text, charts, True, **legend)
        table = html_table(self.rows, *self.headers)
        body += details_block("Groups", table)
        body += details_block("Suggested bounds", f"<pre>{escape(self.bounds)}</pre>\n")
        return html_document(self.title, body)

    def _chart(self, number: int, curve: CurveOfGroup) -> str:
        """Draw one group; all charts have the same axes."""
        figure, ax = new_figure(290, 120, 42, 10, 8, 32)
        low, high = self._limits()
        ax.set_ylim(low, high)
        widest = max(max(c.left) for c in self.curves)
        narrowest = min(min(c.left) for c in self.curves)
        margin = 0.05 * (widest - narrowest) or 0.05
        ax.set_xlim(widest + margin, narrowest - margin)  # from the whole group to the narrow one
        ax.axhline(self.dense, color=INK, lw=0.8, ls="--")
        ax.plot(curve.left, curve.cut, color=CUT, lw=1.5, marker="o", ms=3.5)
        ax.plot(curve.left, curve.repaired, color=KEPT, lw=1.5, marker="o", ms=3.5)
        ax.set_xlabel("width left")
        ax.grid()
        ax.set_xticks(self.widths, [f"{100 * width:.3g}%" for width in self.widths])
        set_ticks(ax.yaxis, 4, percent=self.metric in FRACTION_METRICS)
        values = ", ".join(
            f"{left:.0%} {cut:.4g}" + (f" (repaired {repaired:.4g})" if math.isfinite(repaired) else "")
            for left, cut, repaired in zip(curve.left, curve.cut, curve.repaired, strict=True)
        )
        alt_text = f"{self.metric} with a part of {curve.name}: {values}"
        return inline_svg(figure, f"sensitivity-{number}", alt_text, curve.name)

    def _limits(self) -> tuple[float, float]:
        """Return the range of the values of all charts, with a margin."""
        values = [v for curve in self.curves for v in (*curve.cut, *curve.repaired) if math.isfinite(v)]
        low, high = min([self.dense, *values]), max([self.dense, *values])
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        return low - margin, high + margin
