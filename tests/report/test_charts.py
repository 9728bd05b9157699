"""The charts of a report show its numbers."""

from __future__ import annotations

import copy
import io
import re
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from rich.console import Console

import compress.report.charts
from compress.report.operation_table import OperationRow
from compress.report.page import render_page
from helpers.pages import REPORTS, Document, drawn, made_up, outlines, svg_of


def test_every_chart_has_a_label_and_scales() -> None:
    expected = {
        "full": 2 + 2 * (1 + 8) + (3 + 2),  # widths, importance and scores of all and of each, curves of two stages
        "training-free": 1,
        "many groups": 3 + 2 * (1 + 9) + 5,
        "nothing": 0,
    }
    for name in REPORTS:
        pictures = Document(drawn(name)).all("svg")
        assert len(pictures) == expected[name], name
        for attrs, _ in pictures:
            assert attrs["role"] == "img" and attrs["aria-label"] and attrs["viewbox"].startswith("0 0 ")


def test_histograms_have_the_area_of_kept_and_dropped_dimensions() -> None:
    report = REPORTS["full"]
    html = render_page(report)
    for row in report.groups:
        svg = svg_of(html, f"Importance of {re.escape(row.name)}: {row.kept} kept and {row.width - row.kept} dropped")
        kept, dropped = (
            sum(
                abs(np.dot(p[:, 0], np.roll(p[:, 1], 1)) - np.dot(p[:, 1], np.roll(p[:, 0], 1)))
                for p in outlines(svg, c)
            )
            for c in ("kept", "cut")
        )
        assert kept / dropped == pytest.approx(row.kept / (row.width - row.kept), rel=1e-3)


def test_curves_show_the_dense_value_and_every_stage() -> None:
    html = drawn("full")
    captions = [text for _, text in Document(html).all("figcaption")]
    stages = [caption for caption in captions if caption.startswith(("search: ", "finetune: "))]
    assert [stage for stage in stages if not stage.endswith("scores")] == [
        "search: task", "search: penalty", "search: lr", "finetune: loss", "finetune: validation accuracy"
    ]  # fmt: skip
    curve = svg_of(html, "val_accuracy by epoch")
    assert "dense 94.14%" in curve and "cut 61.21%" in curve and "stroke-dasharray" in html
    assert ">kept<" in curve and ">kept<" not in svg_of(html, "loss by epoch")
    said = "eights of step 27 of 36: of those measured, the best on validation"
    assert f"<p>W{said}.</p>" in html
    assert ">kept<" not in svg_of(render_page(replace(REPORTS["full"], kept={})), "val_accuracy by epoch")
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(REPORTS["full"])
    assert f"w{said}" in console.export_text()


def test_scores_are_drawn_as_the_search_left_them() -> None:
    moments = REPORTS["full"].scores
    svg = svg_of(drawn("full"), "Scores, search: all scores")
    words = f"{moments[0]['all'][0]:.3g} to {moments[0]['all'][-1]:.3g} at step 0"
    assert words in svg and "at step 1000" in svg
    lines = re.findall(r'<path d="([^"]*)"[^>]*stroke: var\(--kept\)', svg)
    assert len(lines) == 20  # quantiles, and the median apart
    heights = sorted((float(re.findall(r"[ML] \S+ (\S+)", line)[-1]) for line in lines), reverse=True)
    expected = np.delete(moments[-1]["all"], 10)
    assert np.diff(heights) / np.diff(expected) == pytest.approx(
        np.full(19, np.ptp(heights) / -np.ptp(expected)), rel=1e-3
    )


def test_importance_of_all_groups_is_relative_to_each_ones_mean() -> None:
    report = made_up(2)
    scaled = copy.deepcopy(report)
    scaled.importance[report.groups[0].name] = [1024 * v for v in report.importance[report.groups[0].name]]
    one, other = (
        svg_of(render_page(r), "Importance of all 2 groups, relative to the mean of each") for r in (report, scaled)
    )
    assert one == other
    largest = max(max(values) / np.mean(values) for values in report.importance.values())
    assert f"to {largest:.3g}" in one


def test_page_says_which_groups_have_their_own_chart() -> None:
    words = "Of 150 groups, 9 are also shown one by one: every kind, from the first to the last. The table has all."
    assert drawn("many groups").count(words) == 2  # importance and scores
    assert "one by one" not in drawn("full")


def test_single_charts_show_narrow_kinds_as_well_and_name_the_kind() -> None:
    report = made_up(40)
    for row, (kind, part) in zip(
        report.groups, 2 * [("attention", "qk"), ("attention", "v"), ("heads", "")], strict=False
    ):
        row.kind, row.attention_part = kind, part  # the first six, which are the narrowest
    captions = [text for _, text in Document(render_page(report)).all("figcaption")]
    expected = {0: "attention qk", 1: "attention v", 2: "heads", 3: "attention qk", 4: "attention v", 5: "heads"}
    expected |= {6: "channels", 22: "channels", 39: "channels"}
    start = captions.index("all 40 groups, relative to the mean of each") + 1
    assert captions[start : start + 10] == [
        *(f"layer{i}.conv ({kind})" for i, kind in expected.items()), "search: all scores"
    ]  # fmt: skip


def test_single_charts_of_operations_are_counted_among_the_choices() -> None:
    report = made_up(3)
    strengths = {"conv": 0.6, "skip": 0.4}
    report.operations = [OperationRow(f"edge{i}", 1, "conv", strengths, strengths, strengths) for i in range(14)]
    report.scores = [
        {
            "stage": "operations",
            "step": step,
            "all": [0.4, 0.5, 0.6],
            "groups": {f"edge{i}": [0.4, 0.5, 0.6] for i in range(9)},
        }
        for step in (0, 10)
    ]
    html = render_page(report)
    assert "Of 14 choices, 9 are also shown one by one: from the first to the last. The table has all." in html
    assert "edge8" in [text for _, text in Document(html).all("figcaption")]


def test_swatch_of_a_legend_has_the_color_of_the_line() -> None:
    assert '<i style="background:var(--text)"></i>median' in drawn("full")  # text in paragraphs is paler


def test_curves_stay_below_the_upper_edge() -> None:
    for label in ("Scores, search: all scores", "val_accuracy by epoch", "loss by epoch"):
        svg = svg_of(drawn("full"), label)
        ends, lines = (re.findall(rf'<path d="([^"]*)"[^>]*stroke: var\(--{c}\)', svg) for c in ("grid", "kept"))
        paths = [[float(y) for y in re.findall(r"[ML] \S+ (\S+)", line)] for line in lines]
        heights = [y for path in paths for y in path if len(path) > 4]  # the legend has shorter ones
        edges = [float(y) for line in ends for y in re.findall(r"[ML] \S+ (\S+)", line)]
        top, bottom = min(edges), max(edges)
        assert min(heights) > top + 0.05 * (bottom - top), label


def test_scores_have_a_named_axis() -> None:
    for svg in re.findall(r'<svg[^>]*aria-label="Scores.*?</svg>', drawn("full"), flags=re.DOTALL):
        assert "step" in [text for _, text in Document(svg).all("text")]


def test_zeros_have_a_separate_bar_and_are_counted() -> None:
    report = made_up(1)
    report.groups[0].kept = 6
    report.importance = {report.groups[0].name: [0.0] * 10 + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
    svg = svg_of(render_page(report), f"Importance of {report.groups[0].name}: 6 kept and 10 dropped, from 0 to 6")
    assert ">10 at 0<" in svg
    first = min(float(corner[:, 0].max()) for corner in outlines(svg, "cut"))
    assert first < min(float(corner[:, 0].min()) for corner in outlines(svg, "kept"))


def test_repeated_stage_continues_where_it_ended() -> None:
    records = [{"stage": "search", "epoch": epoch, "loss": float(i)} for i, epoch in enumerate([0, 1, 2, 1, 2])]
    assert compress.report.charts._curve_points(records, "epoch", "loss") == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])


def test_long_series_is_thinned_and_keeps_its_mean() -> None:
    records = [{"step": i, "loss": float(i % 7)} for i in range(800 * 7)]
    x, y = compress.report.charts._curve_points(records, "step", "loss")
    assert len(x) == len(y) == compress.report.charts.MAX_POINTS
    assert np.mean(y) == pytest.approx(3) and np.mean(x) == pytest.approx((800 * 7 - 1) / 2)


def test_page_does_not_change_the_settings_of_matplotlib() -> None:
    expected = drawn("training-free")
    with matplotlib.rc_context({"font.size": 23.0, "svg.fonttype": "path", "axes.grid": True}):
        before = dict(matplotlib.rcParams)
        assert render_page(REPORTS["training-free"]) == expected
        assert dict(matplotlib.rcParams) == before


def test_policy_charts_show_probabilities_and_numbers() -> None:
    report = copy.deepcopy(REPORTS["training-free"])
    for step, wide in ((0, 0.5), (10, 0.7), (20, 0.9)):
        groups = {row.name: {"widths": [4, 8], "probabilities": [1 - wide, wide]} for row in report.groups}
        numbers = {"reward": wide if step else None, "entropy": 1 - wide, "phi": 100 - step, "phi_range": [50, 100]}
        report.scores.append({"stage": "search", "step": step, "policy": {"groups": groups, **numbers}})
    html = render_page(report)
    for row in report.groups:
        label = f"Probabilities of the widths of {re.escape(row.name)} at step 20: 4 10%, 8 90%"
        dark, light = (outlines_of_opacity(svg_of(html, label), opacity) for opacity in ("0.5", None))
        assert dark and light
    assert "0.7 at step 10, 0.9 at step 20" in svg_of(html, "Policy, search: reward, moving average")
    assert "100 at step 0, 80 at step 20" in svg_of(html, "Policy, search: level of sharing")
    captions = [text for _, text in Document(html).all("figcaption")]
    assert "search: entropy" in captions and not any("cosine" in caption for caption in captions)


def outlines_of_opacity(svg: str, opacity: str | None) -> list[str]:
    """Return the filled areas of an opacity; None: those without one."""
    areas = re.findall(r'<(?:path|use)[^>]*style="([^"]*fill: var\(--kept\)[^"]*)"', svg)
    return [style for style in areas if (f"opacity: {opacity}" in style if opacity else "opacity" not in style)]
