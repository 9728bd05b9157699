"""The charts of a report: widths, importance, scores and curves.

To add a chart, write a function that returns its section of the page and list it in `CHARTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from compress.cells import Genotype, draw_cell
from compress.formatting import FRACTION_METRICS
from compress.search import spread_over_kinds

from .cost_charts import cost_charts
from .landscape import Landscape
from .landscape_charts import landscape_sections
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
PENALTY_TERMS = ("penalty", "coupling")
MAX_POLICY_GROUPS = 60  # with a chart of their own
POLICY_NUMBERS = {  # key in a snapshot -> label
    "reward": "reward, moving average",
    "entropy": "entropy",
    "phi": "level of sharing Φ",
    "cosine": "cosine between the gradients of candidates",
    "coupled_gradient": "norm of coupled gradients",
}


def render_charts(report: Report) -> str:
    """Return the sections of all charts, as far as there are data for them."""
    with chart_style():
        return "".join(draw(report) for draw in CHARTS)


def metric_label(name: str, value: float) -> str:
    """Format a metric's value for the page: fractions in percent, others with four digits."""
    return f"{value:.2%}" if name in FRACTION_METRICS and math.isfinite(value) else f"{value:.4g}"


def _cell_charts(report: Report) -> str:
    """Draw the cells of the genotype: operations on the edges, nodes from left to right."""
    if report.genotype is None:
        return ""
    genotype = Genotype.from_dict(report.genotype)
    charts = [
        f"<figure><figcaption>{title}, width {cell.width:.3g}, depth {cell.depth}</figcaption>"
        f"{draw_cell(cell, title)}</figure>\n"
        for kind, cell in genotype.cells.items()
        for title in ("cell" if len(genotype.cells) == 1 else f"{kind} cell",)
    ]
    text = (
        "The chosen operations; an edge that is not drawn is removed. Width: the number of nodes, each counted with "
        "the part of its edges that come from an input. Depth: the edges on the longest path from input to output."
    )
    return chart_section("Cells", text, charts)


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
    """Draw histograms of the importance: of all groups, relative to the mean of each, and of some of every kind."""
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
    kinds = {row.name: row.kind_and_part for row in report.groups if row.name in by_group}
    small = [
        _histogram_chart(f"part{i}", name, 150, 80, *by_group[name], f"{name} ({kinds[name]})")
        for i, name in enumerate(spread_over_kinds(kinds))
    ]
    charts = []
    if by_group:
        caption = f"all {len(by_group)} groups, relative to the mean of each"
        charts.append(_histogram_chart("parts", caption, 400, height_beside(small, 84), all_kept, all_dropped))
    text = f"At the cut. Each chart has its own scale.{_shown_groups_note(len(small), len(by_group))}"
    return chart_section("Importance", text, charts + small_charts(small), kept=KEPT, dropped=CUT)


def _shown_groups_note(shown: int, total: int, noun: str = "groups") -> str:
    """Say which groups have their own chart, if not all have."""
    if shown >= total:
        return ""
    kinds = "every kind, " if noun == "groups" else ""
    return (
        f" Of {total} {noun}, {shown} are also shown one by one: {kinds}from the first to the last. The table has all."
    )


def _score_charts(report: Report) -> str:
    """Draw quantiles of the scores during the search: of all groups, and of those that were recorded."""
    charts: list[str] = []
    kinds = {row.name: f" ({row.kind_and_part})" for row in report.groups}
    notes: dict[str, None] = {}  # in order, each once
    for stage, snapshots in _snapshots_by_stage(report, "all").items():
        steps = [snapshot["step"] for snapshot in snapshots]
        small = []
        for i, name in enumerate(snapshots[0]["groups"]):
            quantiles, caption = [s["groups"][name] for s in snapshots], f"{name}{kinds.get(name, '')}"
            small.append(_quantile_chart(f"spread{len(charts)}-{i}", name, 150, 92, steps, quantiles, caption))
        total, noun = (len(report.operations), "choices") if stage == "operations" else (len(report.groups), "groups")
        notes[_shown_groups_note(len(small), total, noun)] = None
        id_prefix, caption, height = f"spread{len(charts)}", f"{stage}: all scores", height_beside(small, 96)
        quantiles = [snapshot["all"] for snapshot in snapshots]
        charts += [_quantile_chart(id_prefix, caption, 400, height, steps, quantiles), *small_charts(small)]
    text = "During the search. Lines are quantiles: every 5% of all scores, every 10% within a group."
    return chart_section("Scores", text + "".join(notes), charts, median=INK)


def _snapshots_by_stage(report: Report, key: str) -> dict[str, list[dict[str, Any]]]:
    """Return the snapshots of each search that have a key."""
    by_stage: dict[str, list[dict[str, Any]]] = {}
    for snapshot in report.scores:
        if key in snapshot:
            by_stage.setdefault(str(snapshot["stage"]), []).append(snapshot)
    return by_stage


def _policy_charts(report: Report) -> str:
    """Draw the probabilities of each group's candidate widths during the search, and the numbers of the policy."""
    charts: list[str] = []
    for stage, snapshots in _snapshots_by_stage(report, "policy").items():
        steps, policies = [s["step"] for s in snapshots], [s["policy"] for s in snapshots]
        for key, label in POLICY_NUMBERS.items():
            points = [
                (step, policy[key]) for step, policy in zip(steps, policies, strict=True) if policy.get(key) is not None
            ]
            if points:
                charts.append(_policy_number_chart(f"policy{len(charts)}", f"{stage}: {label}", points))
        small = [
            _probability_chart(f"policy{len(charts)}-{i}", name, steps, [policy["groups"][name] for policy in policies])
            for i, name in enumerate(list(policies[0]["groups"])[:MAX_POLICY_GROUPS])
        ]
        charts += small_charts(small)
    text = "During the search. The areas are the probabilities of a group's candidate widths, the widest darkest."
    return chart_section("Policy", text, charts)


def _policy_number_chart(id_prefix: str, caption: str, points: Sequence[tuple[int, float]]) -> str:
    figure, ax = new_figure(360, 140, 46, 12, 8, 36)
    ax.margins(y=HEADROOM)
    ax.plot(*zip(*points, strict=True), color=KEPT, lw=1.5, marker="o" if len(points) <= 40 else "", ms=3)
    ax.set_xlabel("step")
    ax.grid()
    set_ticks(ax.xaxis, 6)
    set_ticks(ax.yaxis, 4)
    (first, start), (last, end) = points[0], points[-1]
    alt_text = f"Policy, {caption}: {start:.4g} at step {first}, {end:.4g} at step {last}"
    return inline_svg(figure, id_prefix, alt_text, caption)


def _probability_chart(id_prefix: str, name: str, steps: Sequence[int], groups: Sequence[Mapping[str, Any]]) -> str:
    """Draw the probabilities of one group's candidates as stacked areas."""
    figure, ax = new_figure(150, 92, 32, 16, 4, 32)
    bottom, widths = np.zeros(len(steps)), groups[-1]["widths"]
    for k in range(len(widths)):
        top = bottom + np.array([group["probabilities"][k] for group in groups])
        ax.fill_between(steps, bottom, top, color=KEPT, alpha=(k + 1) / len(widths), lw=0)
        bottom = top
    ax.set(ylim=(0, 1), xlim=(steps[0], max(steps[-1], steps[0] + 1)), yticks=[0, 0.5, 1])
    ax.set_xlabel("step", labelpad=1)
    set_ticks(ax.xaxis, 3)
    final = ", ".join(f"{w} {p:.0%}" for w, p in zip(widths, groups[-1]["probabilities"], strict=True))
    return inline_svg(figure, id_prefix, f"Probabilities of the widths of {name} at step {steps[-1]}: {final}", name)


def _quantile_chart(
    id_prefix: str,
    name: str,
    width: int,
    height: int,
    steps: Sequence[int],
    quantiles: Sequence[Sequence[float]],
    caption: str = "",
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
    return inline_svg(figure, id_prefix, alt_text, caption or name)


def _histogram_chart(
    id_prefix: str, name: str, width: int, height: int, kept: list[float], dropped: list[float], caption: str = ""
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
    return inline_svg(figure, id_prefix, alt_text, caption or name)


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


def _landscape_charts(report: Report) -> str:
    """Draw loss and gradient noise around the weights, if `compress landscape` has measured them."""
    return landscape_sections(Landscape.from_dict(report.landscape)) if report.landscape else ""


CHARTS: tuple[Callable[[Report], str], ...] = (
    _cell_charts,
    _width_charts,
    _importance_charts,
    _score_charts,
    cost_charts,
    _policy_charts,
    _curve_charts,
    _landscape_charts,
)
