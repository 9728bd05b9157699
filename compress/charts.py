"""Charts: the pictures of a report as inline SVG, in the colours of the page that they stand in."""

from __future__ import annotations

import io
import math
import re
import warnings
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from .report import Report, Row
from .watch import WIDEST

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Colours of the drawings stand for those of the page, which are light or dark; a $ in a name is a $.
INK, GRID, PALE, KEPT, CUT, MORE, LAST = COLOURS = [f"#0a0b0{i}" for i in range(7)]
IN_CSS = ["currentColor", *(f"var(--{name})" for name in ("grid", "pale", "kept", "cut", "more", "last"))]
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "compress", "font.size": 11, "axes.axisbelow": True}
STYLE |= {"axes.titlelocation": "left", "axes.titlesize": 11, "axes.titlepad": 5, "grid.linewidth": 0.6}
STYLE |= {f"{axis}tick.{ticks}.size": 0 for axis in "xy" for ticks in ("major", "minor")}
STYLE |= dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False)
STYLE |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK)
STYLE |= dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), GRID)
FRACTIONS, POINTS = ("accuracy", "top5"), 400
HEADROOM = 0.12  # above and below curves, as a part of their range
FITS, DRAWS = ("loss", "task", "primary", "auxiliary", "distil", "features"), ("penalty", "bond")  # terms of losses


def charts(report: Report) -> str:
    """Sections of widths, importance, scores and curves, as far as there are any."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of letters that matplotlib's font lacks: the browser draws them
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        return _widths(report.groups) + _importance(report) + _spread(report) + _curves(report)


def shown(name: str, value: float) -> str:
    """A measured value as the page has it: fractions in percent, others in four digits."""
    return f"{value:.2%}" if name in FRACTIONS and math.isfinite(value) else f"{value:.4g}"


def _plain(value: float) -> str:
    """A number at an axis: 2.5e-5, not 2.5e-05."""
    return re.sub(r"e([-+])0", r"e\1", f"{value:g}").replace("e+", "e")


def _figure(width: int, height: int, left: int, right: int, top: int = 4, bottom: int = 22) -> tuple[Figure, Axes]:
    """A figure with axes, in CSS pixels; no layout engine, so that the measures of no font matter."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72, facecolor="none")
    box = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    return figure, figure.add_axes(box, facecolor="none")


def _svg(figure: Figure, key: str, words: str, caption: str = "") -> str:
    """The figure as inline SVG in the page's colours; its ids begin with the key."""

    def mend(tag: re.Match[str]) -> str:
        text = re.sub(r'^<g id="[^"]*"', "<g", tag[0]).replace("xlink:href", "href")
        text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{key}-", text)
        text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)
        return re.sub(r"#0a0b0(\d)", lambda match: IN_CSS[int(match[1])], text)

    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    drawn = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", out.getvalue(), flags=re.DOTALL)
    inner = re.sub(r"<[^>]+>", mend, drawn[drawn.index(">", drawn.index("<svg")) + 1 :]).strip()
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    about = f'width="{1.4 * width:.0f}" role="img" aria-label="{escape(words)}"'
    svg = f'<svg viewBox="0 0 {width} {height}" {about}>{inner}'
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>\n" if caption else svg


def _section(title: str, text: str, pictures: list[str], fill: bool = False, **keys: str) -> str:
    """A heading, a line with the key to the colours, and the pictures in a grid; nothing without pictures."""
    for name, colour in keys.items():
        text += f' <span class="key"><i style="background:{IN_CSS[COLOURS.index(colour)]}"></i>{name}</span>'
    grid = f'<div class="grid{" fill" * fill}" style="--least:21rem">\n{"".join(pictures)}</div>\n'
    said = f"<p>{text}</p>\n" if text else ""
    return f"<h2>{title}</h2>\n{said}{grid}" if pictures else ""


def _widths(rows: list[Row]) -> str:
    """What is left of every group as a part of its own width, in as many columns as keep the picture low."""
    columns = 1 if len(rows) <= 3 else 2 if len(rows) <= 40 else 3
    size, pictures = math.ceil(len(rows) / columns), []
    for start in range(0, len(rows), max(size, 1)):
        part = rows[start : start + size]
        y, left = range(len(part)), [row.kept / max(row.width, 1) for row in part]
        labels = [row.name if len(row.name) <= 20 else f"…{row.name[-19:]}" for row in part]
        counts = [f"{row.kept} of {row.width}" for row in part]
        margins = 14 + 6 * max(map(len, labels)), 50 + round(6.8 * max(map(len, counts)))
        figure, ax = _figure(400, 16 * len(part) + 24, *margins, 4, 20)
        ax.barh(y, [1.0] * len(part), color=PALE, height=0.74)
        ax.barh(y, left, color=KEPT, height=0.74)
        ax.set(xlim=(0, 1), xticks=[0, 0.5, 1], xticklabels=["0", "50%", "100%"])
        ax.set(yticks=y, yticklabels=labels, ylim=(len(part) - 0.4, -0.6))
        ax.spines["bottom"].set_visible(False)
        beside = ax.get_yaxis_transform()
        for i, (share, count) in enumerate(zip(left, counts, strict=True)):
            for right, text in ((36, f"{share:.0%}"), (margins[1] - 2, count)):
                at = 1 + right / (400 - sum(margins))
                ax.text(at, i, text, ha="right", va="center_baseline", transform=beside)
        words = ", ".join(f"{row.name} {row.kept} of {row.width}" for row in part)
        caption = f"groups {start + 1} to {start + len(part)}"
        pictures.append(_svg(figure, f"widths{start}", f"Widths kept in {caption}: {words}", caption))
    text = "In the network's order; each bar is of its group's own width."
    return _section("Widths", text, pictures, columns == 1, dense=PALE, kept=KEPT)


def _importance(report: Report) -> str:
    """Histograms of the importance: of all groups together, relative to the mean of each, and of the widest."""
    kept, parts = {row.name: row.kept for row in report.groups}, {}
    every: tuple[list[float], list[float]] = ([], [])
    for name, values in report.importance.items():
        if ranked := sorted(filter(math.isfinite, values), reverse=True):
            parts[name] = ranked[: kept.get(name)], ranked[kept.get(name, len(ranked)) :]
            mean = float(np.abs(ranked).mean()) or 1.0
            for whole, part in zip(every, parts[name], strict=True):
                whole.extend(value / mean for value in part)
    widest = sorted(parts, key=lambda name: -len(report.importance[name]))[:WIDEST]
    small = [_histogram(f"part{i}", name, 150, 80, *parts[name]) for i, name in enumerate(parts) if name in widest]
    caption = f"all {len(parts)} groups, relative to the mean of each"
    together = [_histogram("parts", caption, 400, _beside(small, 84), *every)] if parts else []
    text = f"At the cut. Every picture has a scale of its own.{_which(len(widest), len(parts))}"
    return _section("Importance", text, together + _small(small), kept=KEPT, dropped=CUT)


def _which(shown: int, groups: int) -> str:
    """Which groups have pictures of their own, where not all of them have."""
    return f" Of {groups} groups, the {shown} widest are also shown one by one." if shown < groups else ""


def _small(pictures: list[str]) -> list[str]:
    return [f'<div class="grid small" style="--least:9rem">\n{"".join(pictures)}</div>\n'] if pictures else []


def _beside(small: list[str], each: int) -> int:
    """The height of a picture that stands beside small ones."""
    return 34 + each * min(max(2, math.ceil(len(small) / 3)), 3)


def _spread(report: Report) -> str:
    """How the scores spread as the search went on: of all groups together, and of those that were watched."""
    pictures: list[str] = []
    for stage in dict.fromkeys(str(moment["stage"]) for moment in report.scores):
        moments = [moment for moment in report.scores if str(moment["stage"]) == stage]
        steps = [moment["step"] for moment in moments]
        small = [
            _quantiles(f"spread{len(pictures)}-{i}", name, 150, 92, steps, [m["groups"][name] for m in moments])
            for i, name in enumerate(moments[0]["groups"])
        ]
        whole, every = f"{stage}: all scores", [moment["all"] for moment in moments]
        pictures += [_quantiles(f"spread{len(pictures)}", whole, 400, _beside(small, 96), steps, every), *_small(small)]
    text = "As the search went on. Lines are quantiles: every 5% of all scores, every 10% within a group."
    text += _which(max((len(moment["groups"]) for moment in report.scores), default=0), len(report.groups))
    return _section("Scores", text, pictures, median=INK)


def _quantiles(key: str, name: str, width: int, height: int, steps: list[int], quantiles: list[list[float]]) -> str:
    """A line for every quantile, and a broad one for the median."""
    figure, ax = _figure(width, height, 32, 16, 4, 32)
    ax.margins(y=HEADROOM)
    values = np.array(quantiles, dtype=float).reshape(len(steps), -1)
    for i, line in enumerate(values.T):
        middle = 2 * i + 1 == values.shape[1]
        ax.plot(steps, line, color=INK if middle else KEPT, lw=1.6 if middle else 0.9)
    ax.set_ylim(bottom=min(0.0, float(np.nanmin(values, initial=0.0))))
    ax.set_xlabel("step", labelpad=1)
    ax.grid()
    _ticks(ax.xaxis, 2 + width // 100)
    _ticks(ax.yaxis, 2 + height // 50)
    first, last = (f"{row.min():.3g} to {row.max():.3g}" for row in (values[0], values[-1]))
    words = f"Scores, {name}: {first} at step {steps[0]}, {last} at step {steps[-1]}"
    return _svg(figure, key, words, name)


def _histogram(key: str, name: str, width: int, height: int, kept: list[float], dropped: list[float]) -> str:
    """How many dimensions have which importance, the dropped ones on top of those that are kept."""
    figure, ax = _figure(width, height, 8, 20, 4, 18)  # the last number at the axis is as broad as that
    every = np.array(kept + dropped)
    above = every[every != 0] if every.min() == 0 < every.max() else every
    low, high = above.min(), above.max()
    log = bool(low > 0 and high > 20 * np.median(above))
    low, high = (low, high) if low < high else (low - 0.5, high + 0.5) if above is every else (0.5 * low, 1.5 * high)
    edges = (np.geomspace if log else np.linspace)(low, high, 20 + width // 20)
    first, second = np.histogram(kept, edges)[0], np.histogram(dropped, edges)[0]
    ax.stairs(first, edges, fill=True, color=KEPT)
    ax.stairs(first + second, edges, baseline=first, fill=True, color=CUT)
    ax.set(yticks=[], xscale="log" if log else "linear", ylim=(0, (1 if above is every else 1.3) * max(first + second)))
    if zeros := every.size - above.size:  # a bar of their own on the left, cut off at the top, and said in words
        far, near = (low * (low / high) ** part if log else low - part * (high - low) for part in (0.1, 0.04))
        below = kept.count(0)
        for height, bottom, colour in ((below, 0, KEPT), (zeros - below, below, CUT)):
            ax.bar([far][: bool(height)], height, near - far, bottom=bottom, color=colour, align="edge")
        ax.text(0.1, 0.98, f"{zeros} at 0", transform=ax.transAxes, va="top", size=9)
        low = far
    ax.set_xlim(low, high)
    ax.spines["left"].set_visible(False)
    _ticks(ax.xaxis, 2 + width // 200)
    words = f"Importance of {name}: {len(kept)} kept and {len(dropped)} dropped, "
    words += f"from {every.min():.3g} to {every.max():.3g}"
    return _svg(figure, key, words, name)


def _ticks(axis: Axis, most: int, percent: bool = False) -> None:
    """Few ticks with plain numbers."""
    axis.get_major_locator().set_params(**{"numticks" if axis.get_scale() == "log" else "nbins": most})
    axis.set_major_formatter(lambda value, _: f"{100 * value:g}%" if percent else _plain(value))
    axis.set_minor_formatter("")


def _curves(report: Report) -> str:
    """What was measured in every stage: losses together, everything else for itself."""
    pictures: list[str] = []
    for stage in dict.fromkeys(str(record.get("stage", "run")) for record in report.history):
        records = [record for record in report.history if str(record.get("stage", "run")) == stage]
        units = [u for u in ("epoch", "step") if all(isinstance(record.get(u), (int, float)) for record in records)]
        unit = units[0] if units else "record"
        names = dict.fromkeys(name for record in records for name in record if name not in ("stage", "step", "epoch"))
        series = {name: found for name in names if (found := _series(records, unit, name))[0]}
        terms = [[name for name in names if name in series] for names in (FITS, DRAWS)]
        if terms[1] and terms[0][1:]:
            terms[0] = [name for name in terms[0] if name != "loss"]  # that has penalties in it, of another size
        elif len(terms[0]) == 2 and series[terms[0][0]] == series[terms[0][1]]:
            terms[0] = terms[0][:1]  # the sum of one term
        others = sorted(set(series) - {*FITS, *DRAWS}, key=lambda name: (not name.startswith("val_"), name))
        for chosen in [*filter(None, terms), *([name] for name in others)]:
            figure, ax = _figure(360, 200, 46, 12, 22, 36)
            ax.margins(y=HEADROOM)
            for name, colour in zip(chosen, (KEPT, CUT, MORE, LAST, INK), strict=False):
                marker = "o" if len(series[name][0]) <= 40 else ""
                label = name if chosen[1:] else None  # one by itself is named by the caption
                ax.plot(*series[name], color=colour, lw=1.5, marker=marker, ms=3.5, label=label)
            metric = chosen[0].removeprefix("val_")
            dense, cut = report.dense.metrics.get(metric, math.nan), report.sliced.get(metric, math.nan)
            if metric != chosen[0] and stage == "finetune" and math.isfinite(cut):
                ax.plot(0, cut, "o", color=CUT, ms=5, label=f"cut {shown(metric, cut)}")
            at = [r for r in records if r.get("step") == report.kept.get("step") and chosen[0] in r]
            if at and metric != chosen[0] and stage == "finetune":
                ax.plot(at[-1][unit], at[-1][chosen[0]], "o", color=INK, ms=8, mfc="none", label="kept")
            if metric != chosen[0] and math.isfinite(dense):
                ax.axhline(dense, color=INK, lw=1, ls="--", label=f"dense {shown(metric, dense)}")
            if ax.get_legend_handles_labels()[1]:
                ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.97), ncols=5, handlelength=1.4, columnspacing=1.2)
            ax.set_xlabel(unit)
            ax.grid()
            _ticks(ax.xaxis, 6)
            _ticks(ax.yaxis, 5, percent=metric in FRACTIONS)
            what = "terms of the loss" if chosen[1:] else chosen[0].replace("val_", "validation ", 1)
            words, caption = f"{', '.join(chosen)} by {unit}", f"{stage}: {what}"
            pictures.append(_svg(figure, f"curve{len(pictures)}", words, caption))
    said = report.which_weights() if pictures else ""
    return _section("Curves", f"{said[:1].upper()}{said[1:]}." if said else "", pictures)


def _series(records: list[dict[str, Any]], unit: str, name: str) -> tuple[list[float], list[float]]:
    """Where and what was measured; where a stage comes again, it goes on from the end of the one before."""
    x, y, ended, last = [], [], 0.0, -math.inf
    for i, record in enumerate(records):
        value, at = record.get(name), record.get(unit, i)
        if isinstance(value, (int, float)) and math.isfinite(value):
            ended, last = (ended + last if at < last else ended), at
            x.append(ended + at)
            y.append(float(value))
    if len(x) > POINTS:
        x, y = ([float(part.mean()) for part in np.array_split(np.array(whole), POINTS)] for whole in (x, y))
    return x, y
