"""Draw figures with matplotlib and embed them in the page as SVG, in the colors of the page."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# matplotlib draws in placeholder colors, which become the CSS colors of the page (light or dark).
INK, GRID, PALE, KEPT, CUT, MORE, LAST = PLACEHOLDERS = [f"#0a0b0{i}" for i in range(7)]
CSS_COLORS = ["currentColor", *(f"var(--{name})" for name in ("grid", "pale", "kept", "cut", "more", "last"))]
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "compress", "font.size": 11, "axes.axisbelow": True}
STYLE |= {"axes.titlelocation": "left", "axes.titlesize": 11, "axes.titlepad": 5, "grid.linewidth": 0.6}
STYLE |= {f"{axis}tick.{ticks}.size": 0 for axis in "xy" for ticks in ("major", "minor")}
# Without parse_math a $ in a name stays a $.
STYLE |= dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False)
STYLE |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK)
STYLE |= dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), GRID)


@contextmanager
def chart_style() -> Iterator[None]:
    """Use matplotlib's defaults with the style of the page, whatever the user has configured."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # glyphs missing from matplotlib's font: the browser has them
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def new_figure(width: int, height: int, left: int, right: int, top: int = 4, bottom: int = 22) -> tuple[Figure, Axes]:
    """Return a figure with axes, in CSS pixels; without a layout engine, which would depend on font metrics."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72, facecolor="none")
    box = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    return figure, figure.add_axes(box, facecolor="none")


def inline_svg(figure: Figure, id_prefix: str, alt_text: str, caption: str = "") -> str:
    """Return the figure as inline SVG in the page's colors; its ids start with `id_prefix`."""

    def adapt_tag(tag: re.Match[str]) -> str:
        text = re.sub(r'^<g id="[^"]*"', "<g", tag[0]).replace("xlink:href", "href")
        text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{id_prefix}-", text)
        text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)
        return re.sub(r"#0a0b0(\d)", lambda match: CSS_COLORS[int(match[1])], text)

    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    drawing = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", out.getvalue(), flags=re.DOTALL)
    content = re.sub(r"<[^>]+>", adapt_tag, drawing[drawing.index(">", drawing.index("<svg")) + 1 :]).strip()
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    attributes = f'width="{1.4 * width:.0f}" role="img" aria-label="{escape(alt_text)}"'
    svg = f'<svg viewBox="0 0 {width} {height}" {attributes}>{content}'
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>\n" if caption else svg


def chart_section(title: str, text: str, charts: list[str], fill: bool = False, **legend: str) -> str:
    """Return a heading, a line of text with the legend of colors, and a grid of charts; empty without charts."""
    for label, color in legend.items():
        css_color = "var(--text)" if color == INK else CSS_COLORS[PLACEHOLDERS.index(color)]  # paragraphs are paler
        text += f' <span class="key"><i style="background:{css_color}"></i>{label}</span>'
    grid = f'<div class="grid{" fill" * fill}" style="--least:21rem">\n{"".join(charts)}</div>\n'
    paragraph = f"<p>{text}</p>\n" if text else ""
    return f"<h2>{title}</h2>\n{paragraph}{grid}" if charts else ""


def small_charts(charts: list[str]) -> list[str]:
    """Return a grid of small charts as one element; no element without charts."""
    return [f'<div class="grid small" style="--least:9rem">\n{"".join(charts)}</div>\n'] if charts else []


def height_beside(small: Sequence[str], each: int) -> int:
    """Return the height of a chart that stands beside a grid of small ones."""
    return 34 + each * min(max(2, math.ceil(len(small) / 3)), 3)


def _axis_number(value: float) -> str:
    """Format a number at an axis: 2.5e-5, not 2.5e-05."""
    return re.sub(r"e([-+])0", r"e\1", f"{value:g}").replace("e+", "e")


def set_ticks(axis: Axis, most: int, percent: bool = False) -> None:
    """Limit the number of ticks and format them as short numbers or percentages."""
    axis.get_major_locator().set_params(**{"numticks" if axis.get_scale() == "log" else "nbins": most})
    axis.set_major_formatter(lambda value, _: f"{100 * value:g}%" if percent else _axis_number(value))
    axis.set_minor_formatter("")
