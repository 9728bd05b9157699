"""The charts of a report: widths, importance, scores and curves.

To add a chart, write a function that returns its section of the page and list it in `CHARTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from compress.formatting import FRACTION_METRICS
from compress.search import LARGEST_GROUPS

from .report import Report
from .svg import (
    CUT,
    INK,
    KEPT,
    LAST,
    MORE,
    PALE,
    chart_section,
    chart_style,
    height_beside,
    inline_svg,
    new_figure,
    set_ticks,
    small_charts,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points: TypeAlias = tuple[list[float], list[float]]  # x and y of a curve
MAX_POINTS = 400  # of a curve
HEADROOM = 0.12  # above and below curves, relative to their range
TASK_TERMS = ("loss", "task", "primary", "auxiliary", "distil", "features")  # terms of the loss
PENALTY_TERMS = ("penalty", "bond")


def render_charts(report: Report) -> str:
    """Return the sections of all charts, as far as there are data for them."""
    with chart_style():
        return "".join(draw(report) for draw in CHARTS)


def metric_label(name: str, value: float) -> str:
    """Format a metric's value for the page: fractions in percent, others with four digits."""
    return f"{value:.2%}" if name in FRACTION_METRICS and math.isfinite(value) else f"{value:.4g}"


def _width_charts(report: Report) -> str:
    """Draw the kept fraction of every group, in as many columns as keep the section low."""
    rows = report.groups
    columns = 1 if len(rows) <= 3 else 2 if len(rows) <= 40 else 3
    rows_per_column, charts = math.ceil(len(rows) / columns), []
    for start in range(0, len(rows), max(rows_per_column, 1)):
        part = rows[start : start + rows_per_column]
        y, fractions = range(len(part)), [row.kept / max(row.width, 1) for row in part]
        labels = [row.name if len(row.name) <= 20 else f"…{row.name[-19:]}" for row in part]
        counts = [f"{row.kept} of {row.width}" for row in part]
        margins = 14 + 6 * max(map(len, labels)), 50 + round(6.8 * max(map(len, counts)))
        figure, ax = new_figure(400, 16 * len(part) + 24, *margins, 4, 20)
        ax.barh(y, [1.0] * len(part), color=PALE, height=0.74)
        ax.barh(y, fractions, color=KEPT, height=0.74)
        ax.set(xlim=(0, 1), xticks=[0, 0.5, 1], xticklabels=["0", "50%", "100%"])
        ax.set(yticks=y, yticklabels=labels, ylim=(len(part) - 0.4, -0.6))
        ax.spines["bottom"].set_visible(False)
        transform = ax.get_yaxis_transform()
        for i, (fraction, count) in enumerate(zip(fractions, counts, strict=True)):
            for offset, text in ((36, f"{fraction:.0%}"), (margins[1] - 2, count)):
                x = 1 + offset / (400 - sum(margins))
                ax.text(x, i, text, ha="right", va="center_baseline", transform=transform)
        values = ", ".join(f"{row.name} {row.kept} of {row.width}" for row in part)
        caption = f"groups {start + 1} to {start + len(part)}"
        charts.append(inline_svg(figure, f"widths{start}", f"Widths kept in {caption}: {values}", caption))
    text = "In the network's order; each bar is relative to its group's own width."
    return chart_section("Widths", text, charts, columns == 1, dense=PALE, kept=KEPT)


def _importance_charts(report: Report) -> str:
    """Draw histograms of the importance: of all groups, relative to the mean of each, and of the widest groups."""
    kept_counts = {row.name: row.kept for row in report.groups}
    by_group: dict[str, tuple[list[float], list[float]]] = {}  # group -> importance of kept and dropped dimensions
    all_kept: list[float] = []
    all_dropped: list[float] = []
    for name, values in report.importance.items():
        if ranked := sorted(filter(math.isfinite, values), reverse=True):
            kept, dropped = ranked[: kept_counts.get(name)], ranked[kept_counts.get(name, len(ranked)) :]
            by_group[name] = kept, dropped
            mean = float(np.abs(ranked).mean()) or 1.0
            all_kept.extend(value / mean for value in kept)
            all_dropped.extend(value / mean for value in dropped)
    widest = sorted(by_group, key=lambda name: -len(report.importance[name]))[:LARGEST_GROUPS]
    small = [
        _histogram_chart(f"part{i}", name, 150, 80, *by_group[name])
        for i, name in enumerate(by_group)
        if name in widest
    ]
    charts = []
    if by_group:
        caption = f"all {len(by_group)} groups, relative to the mean of each"
        charts.append(_histogram_chart("parts", caption, 400, height_beside(small, 84), all_kept, all_dropped))
    text = f"At the cut. Each chart has its own scale.{_shown_groups_note(len(widest), len(by_group))}"
    return chart_section("Importance", text, charts + small_charts(small), kept=KEPT, dropped=CUT)


def _shown_groups_note(shown: int, total: int) -> str:
    """Say which groups have their own chart, if not all have."""
    return f" Of {total} groups, the {shown} widest are also shown one by one." if shown < total else ""


def _score_charts(report: Report) -> str:
    """Draw quantiles of the scores during the search: of all groups, and of those that were recorded."""
    charts: list[str] = []
    for stage in dict.fromkeys(str(snapshot["stage"]) for snapshot in report.scores):
        snapshots = [snapshot for snapshot in report.scores if str(snapshot["stage"]) == stage]
        steps = [snapshot["step"] for snapshot in snapshots]
        small = [
            _quantile_chart(f"spread{len(charts)}-{i}", name, 150, 92, steps, [s["groups"][name] for s in snapshots])
            for i, name in enumerate(snapshots[0]["groups"])
        ]
        id_prefix, caption, height = f"spread{len(charts)}", f"{stage}: all scores", height_beside(small, 96)
        quantiles = [snapshot["all"] for snapshot in snapshots]
        charts += [_quantile_chart(id_prefix, caption, 400, height, steps, quantiles), *small_charts(small)]
    text = "During the search. Lines are quantiles: every 5% of all scores, every 10% within a group."
    recorded_groups = max((len(snapshot["groups"]) for snapshot in report.scores), default=0)
    text += _shown_groups_note(recorded_groups, len(report.groups))
    return chart_section("Scores", text, charts, median=INK)


def _quantile_chart(
    id_prefix: str, name: str, width: int, height: int, steps: Sequence[int], quantiles: Sequence[Sequence[float]]
) -> str:
    """Draw a line for every quantile, and a wider one for the median."""
    figure, ax = new_figure(width, height, 32, 16, 4, 32)
    ax.margins(y=HEADROOM)
    values = np.array(quantiles, dtype=float).reshape(len(steps), -1)
    for i, line in enumerate(values.T):
        is_median = 2 * i + 1 == values.shape[1]
        ax.plot(steps, line, color=INK if is_median else KEPT, lw=1.6 if is_median else 0.9)
    ax.set_ylim(bottom=min(0.0, float(np.nanmin(values, initial=0.0))))
    ax.set_xlabel("step", labelpad=1)
    ax.grid()
    set_ticks(ax.xaxis, 2 + width // 100)
    set_ticks(ax.yaxis, 2 + height // 50)
    first, last = (f"{row.min():.3g} to {row.max():.3g}" for row in (values[0], values[-1]))
    alt_text = f"Scores, {name}: {first} at step {steps[0]}, {last} at step {steps[-1]}"
    return inline_svg(figure, id_prefix, alt_text, name)


def _histogram_chart(
    id_prefix: str, name: str, width: int, height: int, kept: list[float], dropped: list[float]
) -> str:
    """Draw a histogram of the importance, with dropped dimensions stacked on kept ones."""
    figure, ax = new_figure(width, height, 8, 20, 4, 18)  # on the right, half of the last tick label needs room
    values = np.array(kept + dropped)
    nonzero = values[values != 0] if values.min() == 0 < values.max() else values
    has_zeros = nonzero is not values
    low, high = nonzero.min(), nonzero.max()
    log_scale = bool(low > 0 and high > 20 * np.median(nonzero))
    if not low < high:
        low, high = (0.5 * low, 1.5 * high) if has_zeros else (low - 0.5, high + 0.5)
    edges = (np.geomspace if log_scale else np.linspace)(low, high, 20 + width // 20)
    kept_counts, dropped_counts = np.histogram(kept, edges)[0], np.histogram(dropped, edges)[0]
    totals = kept_counts + dropped_counts
    ax.stairs(kept_counts, edges, fill=True, color=KEPT)
    ax.stairs(totals, edges, baseline=kept_counts, fill=True, color=CUT)
    ax.set(yticks=[], xscale="log" if log_scale else "linear", ylim=(0, (1.3 if has_zeros else 1) * max(totals)))
    if num_zeros := values.size - nonzero.size:  # a separate bar on the left, clipped at the top, with its count
        left, right = (low * (low / high) ** part if log_scale else low - part * (high - low) for part in (0.1, 0.04))
        kept_zeros = kept.count(0)
        for count, bottom, color in ((kept_zeros, 0, KEPT), (num_zeros - kept_zeros, kept_zeros, CUT)):
            ax.bar([left][: bool(count)], count, right - left, bottom=bottom, color=color, align="edge")
        ax.text(0.1, 0.98, f"{num_zeros} at 0", transform=ax.transAxes, va="top", size=9)
        low = left
    ax.set_xlim(low, high)
    ax.spines["left"].set_visible(False)
    set_ticks(ax.xaxis, 2 + width // 200)
    alt_text = f"Importance of {name}: {len(kept)} kept and {len(dropped)} dropped, "
    alt_text += f"from {values.min():.3g} to {values.max():.3g}"
    return inline_svg(figure, id_prefix, alt_text, name)


def _curve_charts(report: Report) -> str:
    """Draw the values measured in every stage: the terms of the loss in one chart, every other value in its own."""
    charts: list[str] = []
    for stage in dict.fromkeys(str(record.get("stage", "run")) for record in report.history):
        records = [record for record in report.history if str(record.get("stage", "run")) == stage]
        units = [u for u in ("epoch", "step") if all(isinstance(record.get(u), (int, float)) for record in records)]
        unit = units[0] if units else "record"
        names = dict.fromkeys(name for record in records for name in record if name not in ("stage", "step", "epoch"))
        curves = {name: points for name in names if (points := _curve_points(records, unit, name))[0]}
        for names_in_chart in _names_by_chart(curves):
            label = "terms of the loss" if names_in_chart[1:] else names_in_chart[0].replace("val_", "validation ", 1)
            figure = _curve_figure(report, stage, records, unit, {name: curves[name] for name in names_in_chart})
            alt_text = f"{', '.join(names_in_chart)} by {unit}"
            charts.append(inline_svg(figure, f"curve{len(charts)}", alt_text, f"{stage}: {label}"))
    text = report.kept_weights_text() if charts else ""
    return chart_section("Curves", f"{text[:1].upper()}{text[1:]}." if text else "", charts)


def _names_by_chart(curves: Mapping[str, Points]) -> list[list[str]]:
    """Group the curves of a stage into charts."""
    task_terms = [name for name in TASK_TERMS if name in curves]
    penalty_terms = [name for name in PENALTY_TERMS if name in curves]
    if penalty_terms and task_terms[1:]:
        task_terms = [name for name in task_terms if name != "loss"]  # it includes penalties, which differ in size
    elif len(task_terms) == 2 and curves[task_terms[0]] == curves[task_terms[1]]:
        task_terms = task_terms[:1]  # the sum has one term only
    others = sorted(set(curves) - {*TASK_TERMS, *PENALTY_TERMS}, key=lambda name: (not name.startswith("val_"), name))
    return [*filter(None, (task_terms, penalty_terms)), *([name] for name in others)]


def _curve_figure(
    report: Report, stage: str, records: Sequence[Mapping[str, Any]], unit: str, curves: Mapping[str, Points]
) -> Figure:
    """Draw curves into one figure; validation metrics with the dense value and the values after cut and fine-tuning."""
    figure, ax = new_figure(360, 200, 46, 12, 22, 36)
    ax.margins(y=HEADROOM)
    for (name, points), color in zip(curves.items(), (KEPT, CUT, MORE, LAST, INK), strict=False):
        marker = "o" if len(points[0]) <= 40 else ""
        label = name if len(curves) > 1 else None  # a single curve is named by the caption
        ax.plot(*points, color=color, lw=1.5, marker=marker, ms=3.5, label=label)
    first = next(iter(curves))
    metric = first.removeprefix("val_")
    is_validation = metric != first
    dense, after_cut = report.dense.metrics.get(metric, math.nan), report.sliced.get(metric, math.nan)
    if is_validation and stage == "finetune" and math.isfinite(after_cut):
        ax.plot(0, after_cut, "o", color=CUT, ms=5, label=f"cut {metric_label(metric, after_cut)}")
    kept = [r for r in records if r.get("step") == report.kept.get("step") and first in r]
    if kept and is_validation and stage == "finetune":
        ax.plot(kept[-1][unit], kept[-1][first], "o", color=INK, ms=8, mfc="none", label="kept")
    if is_validation and math.isfinite(dense):
        ax.axhline(dense, color=INK, lw=1, ls="--", label=f"dense {metric_label(metric, dense)}")
    if ax.get_legend_handles_labels()[1]:
        ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.97), ncols=5, handlelength=1.4, columnspacing=1.2)
    ax.set_xlabel(unit)
    ax.grid()
    set_ticks(ax.xaxis, 6)
    set_ticks(ax.yaxis, 5, percent=metric in FRACTION_METRICS)
    return figure


def _curve_points(records: Sequence[Mapping[str, Any]], unit: str, name: str) -> Points:
    """Return the positions and values of a curve; a repeated stage continues where the previous one ended."""
    x, y, offset, last = [], [], 0.0, -math.inf
    for i, record in enumerate(records):
        value, position = record.get(name), record.get(unit, i)
        if isinstance(value, (int, float)) and math.isfinite(value):
            offset, last = (offset + last if position < last else offset), position
            x.append(offset + position)
            y.append(float(value))
    if len(x) > MAX_POINTS:
        x, y = ([float(part.mean()) for part in np.array_split(np.array(values), MAX_POINTS)] for values in (x, y))
    return x, y


CHARTS: tuple[Callable[[Report], str], ...] = (_width_charts, _importance_charts, _score_charts, _curve_charts)
