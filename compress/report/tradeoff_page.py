"""The HTML page of a trade-off: a metric against MACs, parameters and latency, and the table of all networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from compress.formatting import FRACTION_METRICS

from .page import details_block, html_document, html_table
from .report import NetworkNumbers
from .svg import CUT, INK, KEPT, MORE, chart_section, chart_style, inline_svg, new_figure, set_ticks


@dataclass(frozen=True)
class TradeoffPage:
    """Content of the page.

    Attributes:
        networks: name and numbers of each network from the largest to the smallest; the dense one is the first.
        latency_left: latency of each network relative to the dense one, timed in turn with it; None: not timed.
        after_cut: metric of each network before fine-tuning; NaN for the dense one and where nothing was tuned.
        knee: position of the knee among the networks, if there is one.
    """

    title: str
    metric: str | None
    networks: Sequence[tuple[str, NetworkNumbers]]
    latency_left: Sequence[float | None]
    after_cut: Sequence[float]
    knee: int | None
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]

    def render(self) -> str:
        """Return one HTML document, which loads nothing from elsewhere."""
        body = f"<h1>{escape(self.title)}</h1>\n<p>{escape('. '.join(self.notes))}</p>\n"
        with chart_style():
            charts = [] if self.metric is None else [self._chart(*cost) for cost in self._costs_left().items()]
        legend = {"networks": KEPT, "dense": INK} | ({"knee": MORE} if self.knee is not None else {})
        if any(map(math.isfinite, self.after_cut)):
            legend["after the cut"] = CUT
        text = "Costs are relative to the dense network's. Circle: the knee, beyond which the metric falls fast."
        body += chart_section("Trade-off", text, charts, False, **legend)
        table = html_table(self.rows, *self.headers)
        return html_document(self.title, body + details_block("Networks", f'<div class="sides">{table}</div>'))

    def _costs_left(self) -> dict[str, list[float]]:
        """Return each cost of the networks relative to the dense one, as far as all of them were measured."""
        numbers = [numbers for _, numbers in self.networks]
        counts = {"MACs": [float(n.macs) for n in numbers], "parameters": [float(n.params) for n in numbers]}
        costs = {cost: [count / of[0] for count in of] for cost, of in counts.items() if of[0]}
        latency = [left for left in self.latency_left if left is not None]
        return costs | ({"latency": latency} if len(latency) == len(numbers) else {})

    def _chart(self, cost: str, x: Sequence[float]) -> str:
        """Draw the metric against one cost."""
        metric = self.metric or ""
        values = [numbers.metrics.get(metric, math.nan) for _, numbers in self.networks]
        figure, ax = new_figure(360, 220, 46, 14, 10, 36)
        ax.margins(x=0.06, y=0.12)
        if any(map(math.isfinite, self.after_cut)):
            ax.plot(x[1:], self.after_cut[1:], color=CUT, lw=1.2, marker="o", ms=3.5)
        ax.plot(x, values, color=KEPT, lw=1.5, marker="o", ms=4.5)
        ax.plot(x[:1], values[:1], "D", color=INK, ms=6.5)
        ax.axhline(values[0], color=INK, lw=0.8, ls="--")
        if self.knee is not None:
            ax.plot(x[self.knee], values[self.knee], "o", color=MORE, ms=11, mfc="none", mew=2)
        ax.set_xlabel(f"{cost} left")
        ax.grid()
        set_ticks(ax.xaxis, 6, percent=True)
        set_ticks(ax.yaxis, 5, percent=metric in FRACTION_METRICS)
        pairs = zip(self.networks, x, values, strict=True)
        described = "; ".join(
            f"{name}: {position:.0%} of the {cost}, {value:.4g}" for (name, _), position, value in pairs
        )
        return inline_svg(
            figure, f"tradeoff-{cost}", f"{metric} against {cost}: {described}", f"{metric} against {cost}"
        )
