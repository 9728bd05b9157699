"""Report: the result of a pruning run as an object, JSON and a terminal table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text

from compress.budget import UNITS
from compress.formatting import format_count, format_metric, format_time, printable, text_bar
from compress.graph import Groups
from compress.search import CostHistory

from .group_table import GROUP_COLUMNS, GroupRow
from .operation_table import OPERATION_COLUMNS, OperationRow

if TYPE_CHECKING:
    from compress.exporters import ExportReport


@dataclass
class NetworkNumbers:
    """Size, metrics and latency of one network."""

    params: int
    macs: int
    metrics: dict[str, float] = field(default_factory=dict)
    latency_ms: float | None = None  # median
    latency_spread_ms: float | None = None  # half of the distance between the quartiles
    size_bytes: int | None = None  # of the file of the weights
    test: dict[str, float] = field(default_factory=dict)  # metrics on data that chose nothing


@dataclass
class Report:
    """The dense and the pruned network, the groups, the refused groups with reasons, and the course of the run.

    The fields are the keys of report.json.
    """

    dense: NetworkNumbers
    pruned: NetworkNumbers
    groups: list[GroupRow]
    refused: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    sliced: dict[str, float] = field(default_factory=dict)  # metrics right after the cut, before fine-tuning
    importance: dict[str, list[float]] = field(default_factory=dict)  # group -> of each dimension, at its last cut
    scores: list[dict[str, Any]] = field(default_factory=list)  # during the search: their quantiles, or the policy
    history: list[dict[str, Any]] = field(default_factory=list)  # records: stage, step, epoch and the values measured
    seconds: dict[str, float] = field(default_factory=dict)  # stage -> duration
    recipe: dict[str, Any] = field(default_factory=dict)
    export: dict[str, Any] = field(default_factory=dict)  # an ExportReport as JSON data
    machine: dict[str, Any] = field(default_factory=dict)  # see describe_machine
    kept: dict[str, int] = field(default_factory=dict)  # best weights: after step `step` of `of`
    origin: dict[str, Any] = field(default_factory=dict)  # see run_origin
    repair: dict[str, Any] = field(default_factory=dict)  # a Repair as JSON data: the errors of each layer
    operations: list[OperationRow] = field(default_factory=list)  # choices between operations
    genotype: dict[str, Any] | None = None  # of a network of cells, as JSON data
    landscape: dict[str, Any] = field(default_factory=dict)  # a Landscape as JSON data: loss around the weights
    costs: list[CostHistory] = field(default_factory=list)  # of the scores during each search, by half of the data

    def __repr__(self) -> str:
        networks = self.pruned, self.dense
        macs = " of ".join(format_count(network.macs) for network in networks)
        params = " of ".join(format_count(network.params) for network in networks)
        costs = f"{macs} MACs, {params} parameters, {len(self.groups)} groups, {len(self.refused)} left alone"
        return f"Report({', '.join([*self._first_metric(), costs])})"

    def _first_metric(self) -> list[str]:
        """Return the first metric of the pruned and of the dense network as text; empty if nothing was evaluated.

        It is that on test data, if there are any.
        """
        pruned, dense, prefix = self.pruned.metrics, self.dense.metrics, ""
        if self.pruned.test:
            pruned, dense, prefix = self.pruned.test, self.dense.test, "test "
        for metric, value in pruned.items():
            of_dense = f" (dense {format_metric(metric, dense[metric])})" if metric in dense else ""
            return [f"{prefix}{metric} {format_metric(metric, value)}{of_dense}"]
        return []

    @classmethod
    def of(cls, groups: Groups, keep: Mapping[str, Sized]) -> Report:
        """Return the report of a cut that keeps these dimensions of each group, without measurements."""
        cost = groups.cost
        kept = [len(keep[name]) for name in cost.names]
        # The cost of one dimension, with all other groups whole.
        params, macs = (UNITS[unit].cost_per_dimension(groups).astype(int).tolist() for unit in ("params", "macs"))
        removed_branches = [name for name in groups.branches if not len(keep[name])]
        return cls(
            _numbers_of(groups, cost.widths),
            _numbers_of(groups, kept),
            [
                GroupRow(g.name, g.kind, g.width, kept_dims, dim_params, dim_macs, g.attention_part)
                for g, kept_dims, dim_params, dim_macs in zip(groups, kept, params, macs, strict=True)
            ],
            [asdict(refused) for refused in groups.refused],
            [*groups.notes, *_removed_branches_notes(removed_branches)],
        )

    def to_json(self) -> str:
        """Return the text of report.json."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Build a report from the data of report.json."""
        networks = {name: NetworkNumbers(**data[name]) for name in ("dense", "pruned")}
        operations = [OperationRow(**row) for row in data.get("operations", [])]
        groups = [GroupRow(**row) for row in data["groups"]]
        costs = [CostHistory.from_dict(history) for history in data.get("costs", [])]
        return cls(**{**data, **networks, "groups": groups, "operations": operations, "costs": costs})

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a report.json.

        Raises:
            ValueError: the file is damaged or not a report.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_bytes()))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: not a report, or a damaged one ({type(error).__name__}: {error})") from error

    def __rich__(self) -> Stack:
        return Stack(
            self._network_table(),
            *([_export_report(self.export)] if self.export else []),
            *([self._operation_table()] if self.operations else []),
            *([self._group_table()] if self.groups or not self.operations else []),
            *([_refused_table(self.refused)] if self.refused else []),
            *[_plain_text(f"note: {note}", style="yellow") for note in self.notes],
            *([_plain_text(self.kept_weights_text())] if self.kept else []),
        )

    def _network_table(self) -> Table:
        table = Table(title=_plain_text(", ".join(["dense and pruned", *self.origin_labels()])), title_justify="left")
        for header in ("", "dense", "pruned", "left"):
            table.add_column(header, justify="left" if not header else "right")
        for label, dense, pruned in (
            ("parameters", self.dense.params, self.pruned.params),
            ("MACs", self.dense.macs, self.pruned.macs),
        ):
            table.add_row(label, format_count(dense), format_count(pruned), f"{pruned / dense:.1%}" if dense else "-")
        if self.dense.size_bytes and self.pruned.size_bytes:
            sizes = self.dense.size_bytes, self.pruned.size_bytes
            table.add_row("file size", *map(UNITS["size"].format, sizes), f"{sizes[1] / sizes[0]:.1%}")
        if self.dense.latency_ms and self.pruned.latency_ms:
            texts = [f"{format_time(n.latency_ms or 0, n.latency_spread_ms)} ms" for n in (self.dense, self.pruned)]
            table.add_row("latency", *texts, f"{self.pruned.latency_ms / self.dense.latency_ms:.1%}")
        for metric, value in self.dense.metrics.items():
            final, after_cut = self.pruned.metrics.get(metric), self.sliced.get(metric)
            final_text = "-" if final is None else format_metric(metric, final)
            note = ""
            if after_cut is not None and after_cut != final:
                note = f"{format_metric(metric, after_cut)} before fine-tuning"
            table.add_row(_plain_text(metric), format_metric(metric, value), final_text, note)
        for metric, value in self.dense.test.items():
            final = self.pruned.test.get(metric)
            final_text = "-" if final is None else format_metric(metric, final)
            table.add_row(_plain_text(f"test {metric}"), format_metric(metric, value), final_text, "")
        return table

    def _operation_table(self) -> Table:
        table = Table(title="operations", title_justify="left")
        for column in OPERATION_COLUMNS:
            table.add_column(column.header, justify="right" if column.align_right else "left", overflow="fold")
        for row in self.operations:
            table.add_row(*(_plain_text(column.cell(row)) for column in OPERATION_COLUMNS))
        return table

    def _group_table(self) -> Table:
        table = Table(title="groups", title_justify="left")
        for column in GROUP_COLUMNS:
            justify: Any = "right" if column.align_right else "left"
            table.add_column(column.header, justify=justify, no_wrap=column is not GROUP_COLUMNS[0], overflow="fold")
        for row in self.groups:
            cells = (column.cell(row) for column in GROUP_COLUMNS)
            table.add_row(*(text_bar(cell) if isinstance(cell, float) else _plain_text(cell) for cell in cells))
        return table

    def origin_labels(self) -> list[str]:
        """Return what distinguishes this report from others: model, seed, start of the run and library version."""
        prefixes = {"model": "", "seed": "seed ", "date": "", "version": "compress "}
        return [f"{prefix}{self.origin[key]}" for key, prefix in prefixes.items() if key in self.origin]

    def kept_weights_text(self) -> str:
        """Return which weights of fine-tuning were kept, or an empty string if not the best on validation were."""
        if not self.kept:
            return ""
        if not self.kept["step"]:
            return "weights from right after the cut: none that were measured later were as good on validation"
        return f"weights of step {self.kept['step']} of {self.kept['of']}: of those measured, the best on validation"

    def show(self) -> None:
        """Print the report to the terminal."""
        Console().print(self)


def _plain_text(text: str, style: str = "") -> Text:
    """Return a text for the terminal that comes from a model or a file: without markup and control characters."""
    return Text(printable(text), style=style)


def _numbers_of(groups: Groups, widths: Any) -> NetworkNumbers:
    cost = groups.cost
    return NetworkNumbers(int(cost.params(widths)), int(cost.macs(widths)), size_bytes=int(cost.size(widths)))


def _removed_branches_notes(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    count = "1 residual branch is" if len(names) == 1 else f"{len(names)} residual branches are"
    return [f"{count} removed entirely: {', '.join(names)}"]


def _export_report(data: dict[str, Any]) -> ExportReport:
    from compress.exporters import ExportReport  # loaded when there is an export to show

    return ExportReport.from_dict(data)


def _refused_table(refused: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="left alone", title_justify="left")
    for header in ("group", "width", "reason"):
        table.add_column(header, justify="right" if header == "width" else "left", overflow="fold")
    for row in refused:
        table.add_row(*(_plain_text(str(row[key])) for key in ("name", "width", "reason")))
    return table
