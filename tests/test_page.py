"""The page shows what the report says, whole, safely, and without a word to the outside."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import yaml

import compress.charts
from compress.page import page
from compress.report import Report, Row, Side

needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium to look at the page")
SCHEMES = {"dark": "--blink-settings=preferredColorScheme=0", "light": "--blink-settings=preferredColorScheme=1"}
PALETTE = {  # background, kept, cut
    "light": ((244, 246, 249), (36, 96, 216), (224, 123, 44)),
    "dark": ((16, 20, 26), (114, 166, 255), (242, 163, 95)),
}
VOID = {"meta", "link", "br", "hr", "img", "input"}
HOSTILE = "<script>alert(1)</script>"


def made_up(groups: int = 8, trained: bool = True) -> Report:
    """What a pruning of a network with so many groups might have reported."""
    rng = np.random.default_rng(0)
    rows, importance = [], {}
    for i in range(groups):
        width = 16 * 2 ** (4 * i // groups)
        row = Row(f"layer{i}.conv", "channels", width, int(rng.integers(2, width)), 9 * width, 900 * width)
        rows.append(row)
        importance[row.name] = rng.permutation(
            np.concatenate([rng.uniform(0.5, 1, row.kept), rng.uniform(0, 0.5, width - row.kept)])
        ).tolist()
    report = Report(Side(25_557_032, 4_089_284_608), Side(12_853_224, 2_039_284_608), rows, [])
    report.seconds = {"search": 0.4}
    report.recipe = {"search": {"method": "magnitude"}, "budget": {"macs": 0.5, "params": None}, "seed": 3}
    if trained:
        report.dense.metrics, report.dense.latency_ms = {"accuracy": 0.9414, "mAP": 41.25}, 38.42
        report.pruned.metrics, report.pruned.latency_ms = {"accuracy": 0.9372, "mAP": 40.5}, 22.17
        report.dense.latency_spread_ms, report.pruned.latency_spread_ms = 0.61, 0.43
        report.sliced = {"accuracy": 0.6121}
        report.importance = importance
        report.refused = [{"name": "fc", "kind": "output", "width": 1000, "reason": "the network's output"}]
        report.notes = ["2 groups are at min_keep"]
        report.seconds = {"search": 812.3, "finetune": 7421.0}
        report.machine = {"device": "cpu", "threads": 2}
        for step in range(0, 1001, 25):
            spread = {name: np.quantile(values, np.linspace(0, 1, 11)).tolist() for name, values in importance.items()}
            every = np.quantile(
                [value for values in importance.values() for value in values], np.linspace(0, 1, 21)
            ).tolist()
            widest = dict(sorted(spread.items(), key=lambda pair: -len(importance[pair[0]]))[:9])
            report.scores.append({"stage": "search", "step": step, "all": every, "groups": widest})
        for step in range(1000):
            loss = {"loss": 3 - step / 500, "task": 2 - step / 500, "penalty": 1.0, "lr": 0.1}
            report.history.append({"stage": "search", "step": step, "epoch": step / 100, **loss})
        for epoch in range(5):
            report.history.append({"stage": "finetune", "step": 9 * epoch, "epoch": epoch, "loss": 1 / (1 + epoch)})
            report.history.append({"stage": "finetune", "step": 9 * epoch, "epoch": epoch, "val_accuracy": 0.9})
    return report


class Document(HTMLParser):
    """Elements in order as (tag, attributes, text); fails on bad nesting."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict, list[str]]] = []
        self.inside: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice: {attrs}"
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open.append(tag)
            self.inside.append(self.elements[-1][2])

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag
        self.inside.pop()

    def handle_data(self, data):
        for text in self.inside:
            text.append(data)

    def all(self, tag: str, **attributes: str) -> list[tuple[dict, str]]:
        return [
            (attrs, "".join(text))
            for name, attrs, text in self.elements
            if name == tag and all(attrs.get(k.rstrip("_")) == v for k, v in attributes.items())
        ]


def svg_of(html: str, label: str) -> str:
    """The one picture whose label begins so."""
    (found,) = re.findall(rf'<svg[^>]*aria-label="{label}.*?</svg>', html, flags=re.DOTALL)
    return found


def outlines(svg: str, colour: str) -> list[np.ndarray]:
    """Corners of the shapes that are filled with a colour of the page."""
    paths = re.findall(rf'<path d="([^"]*)"[^>]*fill: var\(--{colour}\)', svg)
    return [np.array(re.findall(r"[ML] (\S+) (\S+)", path), dtype=float) for path in paths]


REPORTS = {
    "full": made_up(),
    "training-free": made_up(3, trained=False),
    "many groups": made_up(150),
    "nothing": Report(Side(0, 0), Side(0, 0), [], []),
}


@functools.cache
def drawn(name: str) -> str:
    return page(REPORTS[name])


@pytest.fixture(params=REPORTS)
def pair(request):
    return REPORTS[request.param], drawn(request.param)


def test_page_is_well_formed_and_ids_are_unique(pair) -> None:
    document = Document(pair[1])
    assert pair[1].startswith("<!DOCTYPE html>") and document.elements[0][0] == "html"
    ids = [attrs["id"] for _, attrs, _ in document.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert len(document.all("style")) == len(document.all("title")) == 1  # a picture's style would rule all of the page
    used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', pair[1])
    assert {a or b for a, b in used} <= set(ids)


def test_page_asks_for_nothing_from_outside(pair) -> None:
    document = Document(pair[1])
    for tag, attrs, _ in document.elements:
        assert tag not in ("script", "img", "iframe", "object", "image"), tag
        assert not any(name.startswith("on") for name in attrs), attrs
        for name in ("src", "href", "xlink:href"):
            assert attrs.get(name, "#").startswith(("#", "data:")), attrs
    assert not re.search(r"https?://(?!www\.w3\.org/)|@import|url\((?!#)", pair[1])
    assert "default-src 'none'" in document.all("meta", **{"http-equiv": "Content-Security-Policy"})[0][0]["content"]


def test_same_report_gives_the_same_page(pair) -> None:
    assert page(pair[0]) == pair[1]


def test_every_picture_is_there_with_a_label_and_scales() -> None:
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


def test_text_and_colours_of_pictures_follow_the_page(pair) -> None:
    texts = Document(pair[1]).all("text")
    assert bool(texts) == bool(pair[0].groups) and all("fill: currentColor" in attrs["style"] for attrs, _ in texts)
    assert not re.search(r"(fill|stroke): #", pair[1])


def test_tiles_show_the_numbers_of_the_report() -> None:
    tiles = [text for _, text in Document(drawn("full")).all("div", class_="card")]
    shown = [" ".join(tile.split()) for tile in tiles]
    assert [re.findall(r"[\d.]+[%x]?", tile)[0] for tile in shown[:3]] == ["49.9%", "50.3%", "1.73x"]
    assert "4.09G" in shown[0] and "2.04G" in shown[0] and "25.6M" in shown[1] and "12.9M" in shown[1]
    assert "38.42 ± 0.61 ms" in shown[2] and "22.17 ± 0.43 ms" in shown[2]
    assert re.findall(r"[\d.]+%", shown[3]) == ["93.72%", "94.14%", "61.21%", "93.72%"]
    assert re.findall(r"[\d.]+", shown[4].removeprefix("mAP")) == ["40.5", "41.25", "40.5"]


def test_bars_are_as_long_as_the_numbers_say() -> None:
    html = drawn("full")
    for label, expected in (("MACs", [100, 49.9]), ("accuracy", [94.1, 61.2, 93.7]), ("mAP", [100, 98.2])):
        (card,) = re.findall(rf'<div class="card">{label}.*?</div>', html)
        assert [float(part) for part in re.findall(r"width:([\d.]+)%", card)] == expected
    rows, pictures = REPORTS["full"].groups, re.findall(r'<svg[^>]*aria-label="Widths.*?</svg>', html, flags=re.DOTALL)
    for colour, widths in (("pale", [row.width for row in rows]), ("kept", [row.kept for row in rows])):
        bars = np.array([np.ptp(bar[:, 0]) for svg in pictures for bar in outlines(svg, colour) if len(bar) == 4])
        assert bars / bars[0] == pytest.approx(np.array(widths) / widths[0], rel=1e-3)


def test_histograms_have_the_area_of_what_is_kept_and_dropped() -> None:
    report = REPORTS["full"]
    html = page(report)
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


def test_table_has_every_group_as_the_report_has_it() -> None:
    for name in ("full", "many groups"):
        document, report = Document(drawn(name)), REPORTS[name]
        cells = [text for _, text in document.all("td")][: 7 * len(report.groups)]
        got = [(*cells[i : i + 2], *map(int, cells[i + 2 : i + 4])) for i in range(0, len(cells), 7)]
        assert got == [(row.name, row.kind, row.width, row.kept) for row in report.groups]
        (table,) = re.findall(r"<summary>Groups</summary>.*?</table>", drawn(name), flags=re.DOTALL)
        bars = re.findall(r'style="([^"]*)"', table)
        assert bars == [f"width:{row.kept / row.width:.1%}" for row in report.groups]


def test_recipe_times_machine_notes_and_reasons_are_told() -> None:
    document = Document(drawn("full"))
    ((_, recipe),) = document.all("pre")
    assert yaml.safe_load(recipe) == REPORTS["full"].recipe
    assert document.all("h1")[0][1] == "Pruned by magnitude to 50% of the MACs"
    text = " ".join(text for _, text in document.all("details"))
    for expected in ("the network's output", "2 groups are at min_keep", "0:13:32", "2:03:41", "device"):
        assert expected in text


def test_curves_show_the_dense_value_and_every_stage() -> None:
    html = drawn("full")
    captions = [text for _, text in Document(html).all("figcaption")]
    assert captions.count("search") == 3 and captions.count("finetune") == 2  # task, penalty, lr; loss, accuracy
    curve = svg_of(html, "val_accuracy by epoch")
    assert "dense 94.14%" in curve and "cut 61.21%" in curve and "stroke-dasharray" in html


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


def test_zeros_stand_apart_and_are_counted() -> None:
    report = made_up(1)
    report.groups[0].kept = 6
    report.importance = {report.groups[0].name: [0.0] * 10 + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
    svg = svg_of(page(report), "Importance of all 1 groups: 6 kept and 10 dropped, from 0 to 6")
    assert ">10 at 0<" in svg
    first = min(float(corner[:, 0].max()) for corner in outlines(svg, "cut"))
    assert first < min(float(corner[:, 0].min()) for corner in outlines(svg, "kept"))


def test_stage_that_comes_again_goes_on_from_where_it_ended() -> None:
    records = [{"stage": "search", "epoch": epoch, "loss": float(i)} for i, epoch in enumerate([0, 1, 2, 1, 2])]
    assert compress.charts._series(records, "epoch", "loss") == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])


def test_long_series_is_thinned_and_keeps_its_mean() -> None:
    records = [{"step": i, "loss": float(i % 7)} for i in range(800 * 7)]
    x, y = compress.charts._series(records, "step", "loss")
    assert len(x) == len(y) == compress.charts.POINTS
    assert np.mean(y) == pytest.approx(3) and np.mean(x) == pytest.approx((800 * 7 - 1) / 2)


def test_sections_without_data_are_left_out() -> None:
    headings = {name: [text for _, text in Document(drawn(name)).all("h2")] for name in REPORTS}
    assert headings["full"] == ["Widths", "Importance", "Scores", "Curves"]
    assert headings["training-free"] == ["Widths"] and headings["nothing"] == []
    folds = [text for _, text in Document(drawn("training-free")).all("summary")]
    assert folds == ["Groups", "Time", "Recipe"]


def test_hostile_names_are_text() -> None:
    report = made_up()
    report.groups[0].name = report.groups[0].kind = HOSTILE
    report.groups[1].name = 'a"b&$x_1$ {0} \\frac --> <!-- 层 </svg>'
    report.groups[2].name = "$x_1$"
    report.importance = {row.name: [0.1, 0.2, 0.3] for row in report.groups}
    report.notes = [HOSTILE, "a & b"]
    report.refused = [{"name": HOSTILE, "width": 3, "reason": HOSTILE}]
    report.seconds, report.machine = {HOSTILE: 1.0}, {HOSTILE: HOSTILE}
    report.recipe = {"search": {"method": HOSTILE}, "budget": {HOSTILE: 0.5, "macs": None}, HOSTILE: [HOSTILE]}
    report.dense.metrics[HOSTILE] = report.pruned.metrics[HOSTILE] = report.sliced[HOSTILE] = 1.0
    report.history += [{"stage": HOSTILE, "step": 1, HOSTILE: 1.0, f"val_{HOSTILE}": 2.0}]
    html = page(report)
    assert "<script" not in html and "&lt;script&gt;" in html
    document = Document(html)
    assert not document.all("script")
    assert "$x_1$" in [text for _, text in document.all("text")]
    assert document.all("td")[0][1] == HOSTILE and document.all("td")[7][1] == report.groups[1].name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_shown_as_such(bad: float) -> None:
    report = made_up()
    report.pruned.metrics = {"accuracy": bad, "mAP": bad}
    report.sliced = {"accuracy": bad}
    report.pruned.latency_ms = report.pruned.latency_spread_ms = report.dense.latency_spread_ms = bad
    report.seconds = {"search": bad}
    report.importance = {row.name: [bad, 0.5, 1.0] for row in report.groups} | {"gone": [bad], "empty": []}
    report.history = [
        {"stage": "search", "epoch": 0, "loss": bad, "lr": bad},
        {"stage": "search", "epoch": 1, "loss": 1.0, "val_accuracy": bad},
        {"stage": "search", "loss": None, "remark": "no epoch here"},
        {"loss": 2.0},
        {},
    ]
    html = page(report)
    document = Document(html)
    tile = next(text for _, text in document.all("div", class_="card") if text.startswith("accuracy"))
    assert str(bad) in tile and "94.14%" in tile
    for svg in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        assert not re.search(r'\bd="[^"]*(nan|inf)', svg)


def test_page_leaves_the_settings_of_matplotlib_alone() -> None:
    expected = drawn("training-free")
    with matplotlib.rc_context({"font.size": 23.0, "svg.fonttype": "path", "axes.grid": True}):
        before = dict(matplotlib.rcParams)
        assert page(REPORTS["training-free"]) == expected
        assert dict(matplotlib.rcParams) == before


def browse(folder: Path, html: str, *flags: str) -> tuple[str, str]:
    """Open a page in Chromium, which can reach nothing; what it says on stdout and on its console."""
    (folder / "report.html").write_text(html, encoding="utf-8")
    given = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    given += " --disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=2000"
    given += f" --enable-logging=stderr --user-data-dir={folder / 'profile'}"
    alone = ["--host-resolver-rules=MAP * ~NOTFOUND", (folder / "report.html").as_uri()]
    command = ["chromium", *given.split(), *flags, *alone]
    done = subprocess.run(command, check=True, capture_output=True, timeout=120, text=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (400, "light"), (1200, "dark")])
def test_browser_draws_the_page(tmp_path: Path, width: int, scheme: str) -> None:
    from PIL import Image

    picture, log = tmp_path / "page.png", tmp_path / "net.json"
    flags = [f"--screenshot={picture}", f"--log-net-log={log}", f"--window-size={width},2400", SCHEMES[scheme]]
    _, console = browse(tmp_path, drawn("full"), *flags)
    assert not console
    asked = re.findall(r'"url":"https?://([^/"]+)', log.read_text(encoding="utf-8"))
    assert not [host for host in asked if not host.endswith((".google.com", ".googleapis.com"))]  # the browser's own
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    assert pixels.shape[1] == width
    back, *colours = PALETTE[scheme]
    kept, cut = (np.abs(pixels.astype(int) - colour).sum(-1) < 12 for colour in colours)
    assert kept.mean() > 0.005 and cut.mean() > 0.005  # the bars and histograms
    assert (pixels[:, -8:] == back).all()  # nothing sticks out to the right


@needs_chromium
@pytest.mark.parametrize("width", [1200, 600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(tmp_path: Path, width: int, scheme: str) -> None:
    ask = """<script>const out = [...document.querySelectorAll("body *")].filter(
    e => e.getBoundingClientRect().right > innerWidth + 0.5 && !e.closest(".wide, pre"));
    const small = [...document.querySelectorAll("svg text")].filter(e => e.getBoundingClientRect().height < 8);
    document.title = JSON.stringify([innerWidth, document.documentElement.scrollWidth, out.map(e => e.outerHTML),
    small.map(e => e.textContent), matchMedia("(prefers-color-scheme:dark)").matches])</script>"""
    html = re.sub(r"<meta http-equiv[^>]*>", "", drawn("many groups")).replace("</body>", f"{ask}</body>")
    dom, console = browse(tmp_path, html, "--dump-dom", f"--window-size={width},900", SCHEMES[scheme])
    inner, scroll, out, small, dark = json.loads(unescape(re.findall(r"<title>(.*?)</title>", dom, re.DOTALL)[0]))
    assert inner == width and scroll <= inner and not out and not small and not console
    assert dark == (scheme == "dark")
