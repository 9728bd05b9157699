"""The page shows the whole report, escapes its text, and loads nothing from elsewhere."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import datetime, timezone
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from rich.console import Console
from torch import nn

import compress
from compress.recipe import Recipe
from compress.report.page import render_page
from compress.report.report import Report
from helpers.pages import REPORTS, Document, drawn, made_up, outlines

needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium to look at the page")
SCHEMES = {"dark": "--blink-settings=preferredColorScheme=0", "light": "--blink-settings=preferredColorScheme=1"}
PALETTE = {  # background, kept, cut
    "light": ((244, 246, 249), (36, 96, 216), (224, 123, 44)),
    "dark": ((16, 20, 26), (114, 166, 255), (242, 163, 95)),
}
HOSTILE = "<script>alert(1)</script>"


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


def test_page_loads_nothing_from_elsewhere(pair) -> None:
    document = Document(pair[1])
    for tag, attrs, _ in document.elements:
        assert tag not in ("script", "img", "iframe", "object", "image"), tag
        assert not any(name.startswith("on") for name in attrs), attrs
        for name in ("src", "href", "xlink:href"):
            assert attrs.get(name, "#").startswith(("#", "data:")), attrs
    assert not re.search(r"https?://(?!www\.w3\.org/)|@import|url\((?!#)", pair[1])
    assert "default-src 'none'" in document.all("meta", **{"http-equiv": "Content-Security-Policy"})[0][0]["content"]


def test_same_report_gives_the_same_page(pair) -> None:
    assert render_page(pair[0]) == pair[1]


def test_text_and_colors_of_charts_follow_the_page(pair) -> None:
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


def test_metrics_on_test_data_have_tiles_of_their_own() -> None:
    report = replace(REPORTS["full"])
    report.dense, report.pruned = replace(report.dense, test={"accuracy": 0.9}), replace(report.pruned)
    report.pruned.test = {"accuracy": 0.8}
    (card,) = re.findall(r'<div class="card">test accuracy.*?</div>', render_page(report))
    assert re.findall(r">([\d.]+%)<", card) == ["80.00%", "90.00%", "80.00%"]
    assert re.findall(r"width:([\d.]+)%", card) == ["90.0", "80.0"]
    assert "test accuracy" not in drawn("full")


def test_bars_are_as_long_as_the_numbers_say() -> None:
    html = drawn("full")
    for label, expected in (("MACs", [100, 49.9]), ("accuracy", [94.1, 61.2, 93.7]), ("mAP", [100, 98.2])):
        (card,) = re.findall(rf'<div class="card">{label}.*?</div>', html)
        assert [float(part) for part in re.findall(r"width:([\d.]+)%", card)] == expected
    rows, pictures = REPORTS["full"].groups, re.findall(r'<svg[^>]*aria-label="Widths.*?</svg>', html, flags=re.DOTALL)
    lengths: dict[str, np.ndarray] = {}
    for colour, widths in (("pale", [row.width for row in rows]), ("kept", [row.kept for row in rows])):
        bars = np.array([np.ptp(bar[:, 0]) for svg in pictures for bar in outlines(svg, colour) if len(bar) == 4])
        lengths[colour] = bars
        assert len(bars) == len(widths)
    shares = [row.kept / row.width for row in rows]  # every bar is of its group's own width
    assert lengths["kept"] / lengths["pale"] == pytest.approx(shares, rel=1e-3)
    beside = [text for _, text in Document("".join(pictures)).all("text") if " of " in text]
    assert beside == [f"{row.kept} of {row.width}" for row in rows]


def test_table_has_every_group_as_the_report_has_it() -> None:
    for name in ("full", "many groups"):
        document, report = Document(drawn(name)), REPORTS[name]
        cells = [text for _, text in document.all("td")][: 7 * len(report.groups)]
        got = [(*cells[i : i + 2], *map(int, cells[i + 2 : i + 4])) for i in range(0, len(cells), 7)]
        assert got == [(row.name, row.kind, row.width, row.kept) for row in report.groups]
        (table,) = re.findall(r"<summary>Groups</summary>.*?</table>", drawn(name), flags=re.DOTALL)
        bars = re.findall(r'style="([^"]*)"', table)
        assert bars == [f"width:{row.kept / row.width:.1%}" for row in report.groups]


def test_recipe_times_machine_notes_and_reasons_are_shown() -> None:
    document = Document(drawn("full"))
    (_, own), (_, recipe) = document.all("pre")
    assert yaml.safe_load(recipe) == REPORTS["full"].recipe
    assert yaml.safe_load(own) == {"budget": {"macs": 0.5}, "search": {"method": "magnitude"}, "seed": 3}
    text = " ".join(text for _, text in document.all("details"))
    for expected in ("the network's output", "2 groups are at min_keep", "0:13:32", "2:03:41", "device"):
        assert expected in text


def test_two_reports_can_be_distinguished() -> None:
    document = Document(drawn("full"))
    title = "ResNet pruned by magnitude to 50% of the MACs"
    assert document.all("h1")[0][1] == document.all("title")[0][1] == title
    assert "seed 3, 2024-02-29 12:00 UTC, compress 1.2.3" in document.all("p")[0][1]
    assert (
        Document(drawn("training-free")).all("h1")[0][1] == "Pruned by magnitude to 50% of the MACs"
    )  # of an old file
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(REPORTS["full"])
    assert "ResNet, seed 3, 2024-02-29 12:00 UTC, compress 1.2.3" in console.export_text()


def test_origin_is_that_of_the_run_and_old_files_have_none(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    before = datetime.now(timezone.utc).replace(second=0, microsecond=0)
    recipe = {"budget": {"macs": 0.5}, "seed": 7}
    report = compress.prune(model, recipe, example_inputs=torch.ones(1, 3, 8, 8), quiet=True).report
    date = datetime.strptime(report.origin.pop("date"), "%Y-%m-%d %H:%M %Z").replace(tzinfo=timezone.utc)
    assert before <= date <= datetime.now(timezone.utc)
    assert report.origin == {"model": "Sequential", "seed": 7, "version": compress.__version__}
    timm_model = timm.create_model("resnet10t", num_classes=3)
    report_of_timm = compress.prune(timm_model, recipe, example_inputs=torch.ones(1, 3, 32, 32), quiet=True).report
    assert report_of_timm.origin["model"] == "resnet10t"
    data = json.loads(report.to_json())
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert Report.load(tmp_path / "report.json") == report
    del data["origin"]
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert Report.load(tmp_path / "report.json").origin == {}
    times = re.findall(r"<summary>Time</summary>.*?</table>", render_page(report), flags=re.DOTALL)
    assert "timing" in times[0] and "evaluate" not in times[0]  # there were no data


def test_page_says_how_many_groups_were_verified_and_left_alone() -> None:
    said = Document(drawn("full")).all("p")[0][1]
    assert "8 groups were verified" in said and "8 of 8 cut, 1 other left alone." in said
    report = made_up(1, trained=False)
    report.groups[0].kept = report.groups[0].width
    assert "1 group was verified" in render_page(report) and "0 of 1 cut, 0 others left alone." in render_page(report)
    assert "verified" not in drawn("nothing")


def test_short_list_of_refused_groups_is_open_and_a_long_one_is_folded() -> None:
    report = made_up(1, trained=False)
    for count, opened in ((12, True), (13, False)):
        report.refused = [{"name": f"fc{i}", "kind": "output", "width": 3, "reason": "why"} for i in range(count)]
        (opening,) = re.findall(r"<details( open)?><summary>Left alone", render_page(report))
        assert bool(opening) == opened


@pytest.mark.parametrize("name", ["netslim", "bayesnas", "rarts", "magnitude"])
def test_short_recipe_means_what_the_whole_one_does(name: str) -> None:
    report = made_up(1, trained=False)
    trained = {} if name == "magnitude" else {"epochs": "30 steps", "lr": 0.02}
    whole = Recipe.load(
        {
            "budget": {"params": "40%"},
            "search": {"method": name, **trained},
            "target": {"round_to": 8, "exclude": ["fc"]},
            "finetune": {"epochs": 6, "lr": 0.05, "distill": {"temperature": 4, "weight": 0.5}},
        }
    )
    report.recipe = whole.model_dump(mode="json", exclude_none=True)
    (_, own), (_, everything) = Document(render_page(report)).all("pre")
    assert Recipe.load(yaml.safe_load(own)) == Recipe.load(yaml.safe_load(everything)) == whole
    assert len(own.splitlines()) <= 16 and "seed" not in own and "seed" in everything


def test_recipe_that_cannot_be_read_is_shown_whole() -> None:
    report = made_up(1, trained=False)
    report.recipe = {"search": {"method": "of_somebody", "gamma": 3}, "budget": {"macs": 0.5}}
    ((_, recipe),) = Document(render_page(report)).all("pre")
    assert yaml.safe_load(recipe) == report.recipe


def test_sections_without_data_are_left_out() -> None:
    headings = {name: [text for _, text in Document(drawn(name)).all("h2")] for name in REPORTS}
    assert headings["full"] == ["Widths", "Importance", "Scores", "Curves"]
    assert headings["training-free"] == ["Widths"] and headings["nothing"] == []
    folds = [text for _, text in Document(drawn("training-free")).all("summary")]
    assert folds == ["Groups", "Time", "Recipe", "With all defaults"]


def test_hostile_names_are_text() -> None:
    report = made_up()
    report.groups[0].name = report.groups[0].kind = HOSTILE
    report.groups[1].name = 'a"b&$x_1$ {0} \\frac --> <!-- 层 </svg>'
    report.groups[2].name = "$x_1$"
    report.importance = {row.name: [0.1, 0.2, 0.3] for row in report.groups}
    report.notes = [HOSTILE, "a & b"]
    report.refused = [{"name": HOSTILE, "width": 3, "reason": HOSTILE}]
    report.seconds, report.machine = {HOSTILE: 1.0}, {HOSTILE: HOSTILE}
    report.origin = {"model": HOSTILE, "seed": HOSTILE, HOSTILE: HOSTILE}
    report.recipe = {"search": {"method": HOSTILE}, "budget": {HOSTILE: 0.5, "macs": None}, HOSTILE: [HOSTILE]}
    report.dense.metrics[HOSTILE] = report.pruned.metrics[HOSTILE] = report.sliced[HOSTILE] = 1.0
    report.history += [{"stage": HOSTILE, "step": 1, HOSTILE: 1.0, f"val_{HOSTILE}": 2.0}]
    html = render_page(report)
    assert "<script" not in html and "&lt;script&gt;" in html
    document = Document(html)
    assert not document.all("script")
    assert "$x_1$" in [text for _, text in document.all("text")]
    assert document.all("td")[0][1] == HOSTILE and document.all("td")[7][1] == report.groups[1].name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_shown_as_such(bad: float) -> None:
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
    html = render_page(report)
    document = Document(html)
    tile = next(text for _, text in document.all("div", class_="card") if text.startswith("accuracy"))
    assert str(bad) in tile and "94.14%" in tile
    for svg in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        assert not re.search(r'\bd="[^"]*(nan|inf)', svg)


def browse(folder: Path, html: str, *flags: str) -> tuple[str, str]:
    """Open a page in Chromium without network; return its output and console messages."""
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
