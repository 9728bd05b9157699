"""The HTML page of a curve."""

from __future__ import annotations

import math

from compress.report import TradeoffPage

from .curve import Curve


def render_curve(curve: Curve) -> str:
    """Return the curve as one HTML document: charts with the dense network and the knee, and the table."""
    model = curve.points[0].report.origin.get("model")
    knee = curve.knee
    after_cut = [point.report.sliced.get(curve.metric or "", math.nan) for point in curve]
    is_tuned = any(value != curve.value(point.numbers) for value, point in zip(after_cut, curve, strict=True))
    page = TradeoffPage(
        title=f"Trade-off of {model}" if model else "Trade-off",
        metric=curve.metric,
        networks=[("dense", curve.dense), *((str(point.budget), point.numbers) for point in curve)],
        latency_left=[None if curve.dense.latency_ms is None else 1.0, *(point.latency_left for point in curve)],
        after_cut=[math.nan, *(after_cut if is_tuned else [math.nan] * len(after_cut))],
        knee=None if knee is None else curve.points.index(knee) + 1,
        headers=curve.headers,
        rows=curve.rows(),
        notes=curve.notes,
    )
    return page.render()
