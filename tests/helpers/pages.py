"""Made-up reports, their pages, and a parser for pages."""

from __future__ import annotations

import functools
import re
from html.parser import HTMLParser

import numpy as np

from compress.report.group_table import GroupRow
from compress.report.page import render_page
from compress.report.report import NetworkNumbers, Report
from compress.search import spread_over_kinds

VOID = {"meta", "link", "br", "hr", "img", "input"}


def made_up(groups: int = 8, trained: bool = True) -> Report:
    """What a pruning of a network with so many groups might have reported."""
    rng = np.random.default_rng(0)
    rows, importance = [], {}
    for i in range(groups):
        width = 16 * 2 ** (4 * i // groups)
        row = GroupRow(f"layer{i}.conv", "channels", width, int(rng.integers(2, width)), 9 * width, 900 * width)
        rows.append(row)
        importance[row.name] = rng.permutation(
            np.concatenate([rng.uniform(0.5, 1, row.kept), rng.uniform(0, 0.5, width - row.kept)])
        ).tolist()
    report = Report(NetworkNumbers(25_557_032, 4_089_284_608), NetworkNumbers(12_853_224, 2_039_284_608), rows, [])
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
        report.origin = {"model": "ResNet", "seed": 3, "date": "2024-02-29 12:00 UTC", "version": "1.2.3"}
        report.kept = {"step": 27, "of": 36}
        for step in range(0, 1001, 25):
            spread = {name: np.quantile(values, np.linspace(0, 1, 11)).tolist() for name, values in importance.items()}
            every = np.quantile(
                [value for values in importance.values() for value in values], np.linspace(0, 1, 21)
            ).tolist()
            shown = {name: spread[name] for name in spread_over_kinds({row.name: row.kind for row in rows})}
            report.scores.append({"stage": "search", "step": step, "all": every, "groups": shown})
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
    "nothing": Report(NetworkNumbers(0, 0), NetworkNumbers(0, 0), [], []),
}


@functools.cache
def drawn(name: str) -> str:
    return render_page(REPORTS[name])
