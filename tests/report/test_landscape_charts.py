"""Contours are where the values are, in one color scale for all networks."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from compress.report import Landscape, Surface
from compress.report.landscape_charts import BANDS, scale_of
from compress.report.page import render_page
from helpers.pages import Document, made_up, svg_of

AXIS = np.linspace(-1, 1, 5)
A = np.meshgrid(AXIS, AXIS, indexing="ij")[0]


def page(*losses: np.ndarray, variance: np.ndarray | None = None) -> str:
    names = ["dense", "compact"][: len(losses)]
    surfaces = tuple(Surface(name, loss, variance) for name, loss in zip(names, losses, strict=True))
    landscape = Landscape(surfaces, AXIS, None if variance is None else AXIS, 0, 8, 64)
    return render_page(replace(made_up(2), landscape=landscape.to_dict()))


def lines(svg: str) -> list[np.ndarray]:
    """Corners of the lines between the bands."""
    paths = re.findall(r'<path d="([^"]*)"[^>]*style="fill: none; stroke: currentColor; stroke-opacity', svg)
    return [np.array(re.findall(r"[ML] (\S+) (\S+)", path), dtype=float) for path in paths]


def test_contours_of_a_slope_are_parallel_and_equally_far_apart() -> None:
    """The loss rises from 1 to 3 along a, so the line between bands k and k + 1 is at a = -1 + 2 k / BANDS."""
    svg = svg_of(page(2 + A), "Loss of the dense network: 2 at the weights, at most 3")
    left, right = 42.0, 300.0 - 12.0
    found = lines(svg)
    assert len(found) == BANDS - 1
    for k, corners in enumerate(found, 1):
        assert np.ptp(corners[:, 0]) < 1e-3, "a is the horizontal axis"
        assert float(corners[0, 0]) == pytest.approx(left + (right - left) * k / BANDS, abs=0.01)


def test_networks_share_one_scale() -> None:
    html = page(2 + A, 4 + 3 * A)  # 1 to 3, and 1 to 7
    keys = [text for _, text in Document(html).all("span", class_="key")]
    edges = [f"{edge:.3g}" for edge in np.linspace(1, 7, BANDS + 1)]
    assert [f"up to {edges[1]}", *edges[2:]] == keys[-BANDS:]
    dense, compact = (len(lines(svg_of(html, f"Loss of the {name} network"))) for name in ("dense", "compact"))
    assert (dense, compact) == (sum(float(e) < 3 for e in edges[1:-1]), BANDS - 1)
    dense_bands, compact_bands = (
        {*re.findall(r'<path d="M[^"]*"[^>]*fill-opacity: ([\d.]+)', svg_of(html, f"Loss of the {name} network"))}
        for name in ("dense", "compact")
    )
    assert dense_bands < compact_bands, "a color means the same in both"


def test_scale_is_geometric_over_orders_of_magnitude() -> None:
    assert scale_of([np.array([[0.01, 1.0], [np.nan, 100.0]])]) == pytest.approx([10 ** (k / 2 - 2) for k in range(9)])
    assert scale_of([np.array([[-4.0, 1.0]]), np.array([[4.0]])]) == pytest.approx(list(range(-4, 5)))
    assert scale_of([np.array([[3.0, 3.0]])]) == [3, 6]
    assert scale_of([np.array([[np.nan]])]) == []


def test_points_that_are_not_finite_are_marked_and_nothing_is_drawn_there() -> None:
    loss = 2 + A
    loss[4, 3:] = loss[4, 0] = np.nan
    html = page(loss)
    svg = svg_of(html, "Loss of the dense network: 2 at the weights, at most 3, not finite at 3 of 25 points")
    marks = np.array(
        re.findall(r'<use href="#loss0-\w+" x="([\d.]+)" y="([\d.]+)" style="fill: var\(--cut\)', svg), float
    )
    width, height = 300 - 42 - 12, 280 - 6 - 36
    expected = [(42 + width, 6 + height * (1 - row / 4)) for row in (0, 3, 4)]
    assert sorted(map(tuple, marks.tolist())) == [pytest.approx(mark, abs=0.01) for mark in sorted(expected)]
    assert "&times; not finite" in html
    assert "not finite" not in page(2 + A)


def test_a_landscape_without_a_finite_value_or_without_variation_is_drawn() -> None:
    flat = page(np.full((5, 5), 3.0), variance=np.full((5, 5), np.nan))
    assert "Loss of the dense network: 3 at the weights" in flat
    assert "Gradient noise" not in flat
    Document(page(np.full((5, 5), np.nan)))
    Document(page(2 + A, np.full((5, 5), np.nan)))


def test_gradient_noise_is_the_root_of_the_variance() -> None:
    html = page(2 + A, variance=(2 + A) ** 2)
    svg_of(html, "Gradient noise of the dense network: 2 at the weights, at most 3")
    titles = [text for _, text in Document(html).all("h2")]
    assert titles[-2:] == ["Loss landscape", "Gradient noise"]
    assert "Loss landscape" not in render_page(made_up(2))
