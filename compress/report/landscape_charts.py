"""The landscape on the page: contours of loss and gradient noise, one color scale for all networks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from .landscape import Grid, Landscape, centre, highest
from .svg import CUT, INK, KEPT, chart_section, inline_svg, new_figure, set_ticks

BANDS = 8  # of the color scale
PALEST, DEEPEST = 0.05, 0.95  # opacity of the lowest and of the highest band
LOG_SCALE_FROM = 10.0  # ratio of the largest to the smallest value


def landscape_sections(landscape: Landscape) -> str:
    """Return the sections of loss and gradient noise."""
    names = " and ".join(surface.name for surface in landscape.surfaces)
    text = f"Loss of the {escape(names)} network{'s' * (len(landscape.surfaces) > 1)} around the trained weights "
    text += "(+), along two random directions (a, b) whose filters are as long as those of the weights. "
    if landscape.other is not None:
        text += "The directions of the compact network are those of the dense one, cut like its weights. "
    text += f"{landscape.batches} batches with {landscape.samples:g} targets, in evaluation mode. "
    losses = [(surface.name, surface.loss) for surface in landscape.surfaces]
    page = _section("Loss landscape", "loss", text, landscape.axis, losses)
    noises = [(surface.name, surface.noise) for surface in landscape.surfaces if surface.noise is not None]
    if landscape.variance_axis is not None and noises:
        text = "Standard deviation of the gradient of a single sample, at points of the same plane. "
        page += _section("Gradient noise", "gradient noise", text, landscape.variance_axis, noises)
    return page


def scale_of(grids: Sequence[Grid]) -> list[float]:
    """Return the edges of the bands of one color scale: geometric if the values span orders of magnitude."""
    values = np.concatenate([grid[np.isfinite(grid)] for grid in grids])
    if not values.size:
        return []
    low, high = float(values.min()), float(values.max())
    if not low < high:
        return [low, low + (abs(low) or 1.0)]
    spaced = np.geomspace if low > 0 and high > LOG_SCALE_FROM * low else np.linspace
    return [float(edge) for edge in spaced(low, high, BANDS + 1)]


def _section(title: str, quantity: str, text: str, axis: Grid, grids: Sequence[tuple[str, Grid]]) -> str:
    """Draw the contours of all networks with one scale, which is the legend."""
    edges = scale_of([grid for _, grid in grids])
    if not edges:
        return ""
    for i, edge in enumerate(edges[1:]):
        part = 100 * _opacity(i, len(edges) - 1)
        style = f"background:color-mix(in srgb,var(--kept) {part:.1f}%,var(--card));outline:1px solid var(--grid)"
        text += f'<span class="key"><i style="{style}"></i>{"up to " * (not i)}{_short(edge)}</span>'
    if any(not np.isfinite(grid).all() for _, grid in grids):
        text += '<span class="key" style="color:var(--cut)">&times; not finite</span>'
    charts = [
        _contours(f"{quantity.replace(' ', '-')}{i}", name, quantity, axis, grid, edges)
        for i, (name, grid) in enumerate(grids)
    ]
    return chart_section(title, text, charts)


def _contours(id_prefix: str, name: str, quantity: str, axis: Grid, grid: Grid, edges: Sequence[float]) -> str:
    """Draw one grid: filled bands of one color, deeper where the value is larger, and the lines between them."""
    from matplotlib.colors import to_rgba

    figure, ax = new_figure(300, 280, 42, 12, 6, 36)
    bands = len(edges) - 1
    colors = [to_rgba(KEPT, _opacity(i, bands)) for i in range(bands)]
    margin = 1e-6 * (edges[-1] - edges[0])  # the smallest and the largest value belong to the outer bands
    levels = [edges[0] - margin, *edges[1:-1], edges[-1] + margin]
    finite = np.ma.masked_invalid(grid.T)  # columns are the first coordinate
    if finite.count():
        ax.contourf(axis, axis, finite, levels=levels, colors=colors)
        if bands > 1 and finite.min() < finite.max():
            ax.contour(axis, axis, finite, levels=levels[1:-1], colors=[to_rgba(INK, 0.55)], linewidths=0.6)
    gaps = np.argwhere(~np.isfinite(grid))
    ax.plot(axis[gaps[:, 0]], axis[gaps[:, 1]], "x", color=CUT, ms=3.5, clip_on=False)
    ax.plot(0, 0, "+", color=INK, ms=9, mew=1.4)
    ax.set(xlim=(axis[0], axis[-1]), ylim=(axis[0], axis[-1]))
    ax.set_xlabel("a")
    ax.set_ylabel("b")
    set_ticks(ax.xaxis, 5)
    set_ticks(ax.yaxis, 5)
    described = f"{quantity} of the {name} network: {centre(grid):.4g} at the weights, at most {highest(grid):.4g}"
    described += f", not finite at {len(gaps)} of {grid.size} points" if len(gaps) else ""
    return inline_svg(figure, id_prefix, described[:1].upper() + described[1:], f"{name}: {quantity}")


def _short(number: float) -> str:
    """Format a number with three digits: 1250, not 1.25e+03.

    >>> _short(0.04006), _short(1248.1), _short(2.5e9)
    ('0.0401', '1250', '2.5e9')
    """
    return f"{float(f'{number:.3g}'):g}".replace("e+0", "e").replace("e+", "e")


def _opacity(band: int, bands: int) -> float:
    return PALEST + (DEEPEST - PALEST) * band / max(bands - 1, 1)
