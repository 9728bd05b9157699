"""Report: what a pruning did, as an object, a table, JSON and a page."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text
from torch import nn

from .groups import Groups


@dataclass
class Side:
    """One network's numbers."""

    params: int
    macs: int
    metrics: dict[str, float] = field(default_factory=dict)
    latency_ms: float | None = None  # median
    latency_spread_ms: float | None = None  # half of the distance between the quartiles


@dataclass
class Row:
    """One group's line."""

    name: str
    kind: str
    width: int
    kept: int
    params: int  # that one dimension of the dense group carries
    macs: int


@dataclass
class Report:
    """Dense against pruned, the groups that were cut, what was left alone with the reason, and how it went."""

    dense: Side
    pruned: Side
    groups: list[Row]
    refused: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    sliced: dict[str, float] = field(default_factory=dict)  # metrics right after the cut, before fine-tuning
    importance: dict[str, list[float]] = field(default_factory=dict)  # group -> of every dimension, at its last cut
    scores: list[dict[str, Any]] = field(default_factory=list)  # their quantiles as the search went on: watch.py
    history: list[dict[str, Any]] = field(default_factory=list)  # records of stage, step, epoch, and what was measured
    seconds: dict[str, float] = field(default_factory=dict)  # stage -> time it took
    recipe: dict[str, Any] = field(default_factory=dict)
    export: dict[str, Any] = field(default_factory=dict)  # of the file for deployment: an ExportReport as plain data
    machine: dict[str, Any] = field(default_factory=dict)  # device, threads, batch size of the latency, versions
    kept: dict[str, int] = field(default_factory=dict)  # which weights, if the best: behind step `step` of `of`
    origin: dict[str, Any] = field(default_factory=dict)  # model, seed, date and version of the library: see origin()

    def __repr__(self) -> str:
        sides = self.dense, self.pruned
        macs, params = (" of ".join(amount(getattr(side, unit)) for side in sides[::-1]) for unit in ("macs", "params"))
        return f"Report({macs} MACs, {params} parameters, {len(self.groups)} groups, {len(self.refused)} left alone)"

    @classmethod
    def of(cls, groups: Groups, keep: dict[str, Any]) -> Report:
        cost = groups.cost
        kept = [len(keep[name]) for name in cost.names]
        prices = zip(*(cost.prices(unit).astype(int).tolist() for unit in ("params", "macs")), strict=True)
        return cls(
            Side(int(cost.params(cost.widths)), int(cost.macs(cost.widths))),
            Side(int(cost.params(kept)), int(cost.macs(kept))),
            [
                Row(g.name, g.kind, g.width, k, *price)  # of one dimension, all others left whole
                for g, k, price in zip(groups, kept, prices, strict=True)
            ],
            [asdict(r) for r in groups.refused],
            [*groups.notes, *_gone([name for name in groups.branches if not len(keep[name])])],
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        sides = {name: Side(**data[name]) for name in ("dense", "pruned")}
        return cls(**{**data, **sides, "groups": [Row(**row) for row in data["groups"]]})

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """A report.json.

        Raises:
            ValueError: it is damaged, or something else.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_bytes()))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: not a report, or a damaged one ({type(error).__name__}: {error})") from error

    def __rich__(self) -> Stack:
        head = Table(title=", ".join(["dense and pruned", *self.came_from()]), title_justify="left")
        for column in ("", "dense", "pruned", "left"):
            head.add_column(column, justify="left" if not column else "right")
        for label, a, b in (
            ("parameters", self.dense.params, self.pruned.params),
            ("MACs", self.dense.macs, self.pruned.macs),
        ):
            head.add_row(label, amount(a), amount(b), f"{b / a:.1%}" if a else "-")
        if self.dense.latency_ms and self.pruned.latency_ms:
            texts = [f"{timed(s.latency_ms or 0, s.latency_spread_ms)} ms" for s in (self.dense, self.pruned)]
            head.add_row("latency", *texts, f"{self.pruned.latency_ms / self.dense.latency_ms:.1%}")
        for metric, value in self.dense.metrics.items():
            after, cut = self.pruned.metrics.get(metric), self.sliced.get(metric)
            note = f"{shown(metric, cut)} before fine-tuning" if cut is not None and cut != after else ""
            head.add_row(metric, shown(metric, value), "-" if after is None else shown(metric, after), note)
        table = Table(title="groups", title_justify="left")
        for column in ("group", "kind", "width", "kept", "", "params/dim", "MACs/dim"):
            left = column in ("group", "kind", "")
            table.add_column(column, justify="left" if left else "right", no_wrap=column != "group", overflow="fold")
        for row in self.groups:
            table.add_row(
                row.name,
                row.kind,
                str(row.width),
                str(row.kept),
                bar(row.kept / row.width),
                amount(row.params),
                amount(row.macs),
            )
        deployed = [export_report(self.export)] if self.export else []
        return Stack(
            head,
            *deployed,
            table,
            *refusals(self.refused),
            *[Text(f"note: {note}", style="yellow") for note in self.notes],
            *[Text(said) for said in [self.which_weights()] if said],
        )

    def came_from(self) -> list[str]:
        """What tells this report from others: the model, the seed, when the run began, and by which version."""
        words = {"model": "", "seed": "seed ", "date": "", "version": "compress "}
        return [f"{word}{self.origin[key]}" for key, word in words.items() if key in self.origin]

    def which_weights(self) -> str:
        """Which weights of fine-tuning the network has, where the best on validation were chosen."""
        if not self.kept:
            return ""
        return f"weights of step {self.kept['step']} of {self.kept['of']}: of those measured, the best on validation"

    def show(self) -> None:
        Console().print(self)


def export_report(data: dict[str, Any]) -> Any:
    """What was measured of the file for deployment, as an object."""
    from .exporters.report import ExportReport  # it draws on this module

    return ExportReport.from_dict(data)


def shown(metric: str, value: float) -> str:
    """A measurement as people read it: accuracies in percent."""
    return f"{100 * value:.2f} %" if metric in ("accuracy", "top5") else f"{value:.4g}"


def timed(value: float, spread: float | None) -> str:
    """A time and its spread, to the digits that the spread leaves.

    >>> timed(0.6641, 0.14), timed(38.4219, 0.612), timed(1234.5, 123.0), timed(0.6641, None)
    ('0.66 ± 0.14', '38.42 ± 0.61', '1234 ± 123', '0.6641')
    """
    if spread is None or not 0 < spread < math.inf:
        return f"{value:.4g}" if spread is None else f"{value:.4g} ± {spread:.2g}"
    digits = max(0, 1 - math.floor(math.log10(spread)))
    return f"{value:.{digits}f} ± {spread:.{digits}f}"


def origin(model: nn.Module, seed: int) -> dict[str, Any]:
    """What a run is told from others by; it is taken at the start, and a run that goes on keeps it."""
    from . import __version__

    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return {"model": _named(model), "seed": seed, "date": date, "version": __version__}


def _named(model: nn.Module) -> str:
    """What a timm model calls itself, or else its class."""
    told = [getattr(model, name, None) for name in ("pretrained_cfg", "default_cfg")]
    names = [cfg.get("architecture") for cfg in told if isinstance(cfg, Mapping)]
    return next((name for name in names if isinstance(name, str) and name), type(model).__name__)


def machine(device: torch.device, batch_size: int | str) -> dict[str, Any]:
    """What the times were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    threads = {"threads": torch.get_num_threads(), "cores": os.cpu_count()} if device.type == "cpu" else {}
    return {"device": f"{device.type} ({name})", **threads, "batch size": batch_size, "torch": torch.__version__}


def _gone(names: list[str]) -> list[str]:
    if not names:
        return []
    many = "branch is" if len(names) == 1 else "branches are"
    return [f"{len(names)} residual {many} gone altogether: {', '.join(names)}"]


def refusals(refused: list[dict[str, Any]]) -> list[Any]:
    """The groups that are left alone, with the reason."""
    if not refused:
        return []
    table = Table(title="left alone", title_justify="left")
    for column in ("group", "width", "reason"):
        table.add_column(column, justify="right" if column == "width" else "left", overflow="fold")
    for r in refused:
        table.add_row(r["name"], str(r["width"]), r["reason"])
    return [table]


def amount(number: float) -> str:
    """1234567 as 1.23M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}" if number < 1000 * size else f"{number / size:.0f}{unit}"
    return f"{number:g}"


def bar(fraction: float, length: int = 8) -> str:
    full = round(fraction * length)
    return "█" * full + "░" * (length - full)
