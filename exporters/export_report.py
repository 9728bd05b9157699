"""Report of an export: size, difference from the model and latency, as an object, a table and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compress.budget import LatencyRatio
from compress.formatting import format_count, format_metric

from .detection_match import DetectionMatch


@dataclass
class Network:
    """Size of a network as a file, and its latency in onnxruntime and PyTorch; the fields are keys in report.json."""

    bytes: int
    nodes: int
    parameters: int
    initialisers: int
    macs: int | None = None  # of one example
    latency_ms: float | None = None  # in onnxruntime; median
    latency_spread_ms: float | None = None  # half of the interquartile range
    torch_latency_ms: float | None = None
    torch_latency_spread_ms: float | None = None


@dataclass
class Int8:
    """Size, latency and accuracy of a quantized file; the fields are keys in report.json."""

    path: str
    bytes: int
    nodes: int
    calibrated_on: int  # examples
    latency_ms: float
    latency_spread_ms: float
    float_latency_ms: float  # of the float file, timed in turn with this one
    ratio: list[float]  # time as a fraction of the float file's: median and 95 % interval
    metrics: dict[str, float] = field(default_factory=dict)  # evaluated in onnxruntime
    float_metrics: dict[str, float] = field(default_factory=dict)  # of the float file, evaluated in onnxruntime


@dataclass
class ExportReport:
    """Size, difference from the model and latency of an exported file; the fields are keys in report.json."""

    path: str
    opset: int
    half: bool
    inputs: dict[str, list[int | str]]  # name -> shape
    outputs: list[str]
    file: Network
    tolerance: float
    max_abs_diff: float | None  # None if the file was not checked
    max_rel_diff: float | None  # relative to the largest number of the output
    differences: list[dict[str, Any]]  # of each output on each input: the fields of parity.Difference
    threads: int
    batch_size: int
    repeats: int
    dense: Network | None = None
    ratio: list[float] | None = None  # time as a fraction of the dense file's: median and 95 % interval
    torch_ratio: list[float] | None = None
    int8: Int8 | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    detections: DetectionMatch | None = None  # for a complete detector, which is compared by its detections

    @property
    def latency_ms(self) -> float | None:
        """Median latency in onnxruntime."""
        return self.file.latency_ms

    @property
    def speedup(self) -> float | None:
        """Speed-up over the dense file in onnxruntime: the median over pairs of runs."""
        return 1 / self.ratio[0] if self.ratio else None

    @property
    def reduction(self) -> float | None:
        """MACs of the dense network divided by those of the compact one."""
        if self.dense is None or not self.dense.macs or not self.file.macs:
            return None
        return self.dense.macs / self.file.macs

    @property
    def realised(self) -> float | None:
        """Speed-up divided by the reduction of MACs."""
        return self.speedup / self.reduction if self.speedup and self.reduction else None

    def to_dict(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("latency_ms", "speedup", "reduction", "realised")}
        return asdict(self) | derived

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ExportReport:
        fields = {key: value for key, value in data.items() if key in cls.__dataclass_fields__}
        fields["file"] = Network(**data["file"])
        fields["dense"] = Network(**data["dense"]) if data.get("dense") else None
        fields["int8"] = Int8(**data["int8"]) if data.get("int8") else None
        fields["detections"] = DetectionMatch(**data["detections"]) if data.get("detections") else None
        return cls(**fields)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return the rows of the table: label, dense network, compact network, fraction that is left."""
        dense, file = self.dense, self.file
        rows = [
            _table_row("file", format_bytes, dense.bytes if dense else None, file.bytes),
            _table_row("parameters", format_count, dense.parameters if dense else None, file.parameters),
            _table_row("MACs", format_count, dense.macs if dense else None, file.macs),
            _table_row("nodes", str, dense.nodes if dense else None, file.nodes, fraction=False),
        ]
        for label, prefix in (("onnxruntime", ""), ("PyTorch", "torch_")):
            dense_time, file_time = (_format_time(network, prefix) if network else "" for network in (dense, file))
            ratio = self.torch_ratio if prefix else self.ratio
            rows.append((label, dense_time, file_time, _format_ratio(ratio)))
        if self.realised is not None:
            text = f"{self.speedup:.2f}x of {self.reduction:.2f}x fewer MACs: {self.realised:.2f}"
            rows.append(("speed-up realized", "", text, ""))
        if self.max_abs_diff is not None:
            text = f"{self.max_abs_diff:.1e}, {self.max_rel_diff:.1e} of the largest number"
            rows.append(("difference from model", "", text, ""))
        if self.detections is not None:
            rows.append(("difference from mmdet's detections", "", str(self.detections), ""))
        if self.int8 is not None:
            rows += self._int8_rows(self.int8)
        return [row for row in rows if any(row[1:])]

    def _int8_rows(self, int8: Int8) -> list[tuple[str, str, str, str]]:
        float_bytes = self.file.bytes
        float_size, fraction = f"{format_bytes(float_bytes)} as float", f"{int8.bytes / float_bytes:.1%}"
        latency = f"{int8.latency_ms:.3g} ± {int8.latency_spread_ms:.1g} ms"
        float_latency = f"{int8.float_latency_ms:.3g} ms as float"
        rows = [
            ("int8: file", float_size, format_bytes(int8.bytes), fraction),
            ("int8: onnxruntime", float_latency, latency, _format_ratio(int8.ratio)),
        ]
        for metric, value in int8.metrics.items():
            float_value = int8.float_metrics.get(metric)
            text = "" if float_value is None else f"{format_metric(metric, float_value)} as float"
            rows.append((f"int8: {metric}", text, format_metric(metric, value), ""))
        return rows

    @property
    def title(self) -> str:
        shapes = ", ".join(f"{name}{shape}" for name, shape in self.inputs.items()).replace("'", "")
        precision = ", half precision" if self.half else ""
        plural = "s" * (self.threads > 1)
        return (
            f"{self.path}: opset {self.opset}, {shapes}{precision}; times with {self.threads} thread{plural}, "
            f"batch of {self.batch_size}, {self.repeats} runs in turn"
        )

    def __rich__(self) -> Table:
        table = Table(title=Text(self.title), title_justify="left")
        for column in ("", "dense", "exported", "left"):
            table.add_column(column, justify="right" if column else "left")
        for row in self.rows():
            table.add_row(*row)
        return table

    def show(self) -> None:
        Console().print(self)


def _table_row(
    label: str, format_value: Callable[[int], str], dense: int | None, file: int | None, fraction: bool = True
) -> tuple[str, str, str, str]:
    before, after = ("" if value is None else format_value(value) for value in (dense, file))
    return label, before, after, f"{file / dense:.1%}" if fraction and dense and file else ""


def _format_ratio(ratio: list[float] | None) -> str:
    return str(LatencyRatio(ratio[0], ratio[1], ratio[2], 0)) if ratio else ""


def _format_time(network: Network, prefix: str) -> str:
    median, spread = getattr(network, f"{prefix}latency_ms"), getattr(network, f"{prefix}latency_spread_ms")
    return "" if median is None else f"{median:.3g} ± {spread:.1g} ms"


def format_bytes(count: float) -> str:
    """Format a file size: 1.2MB."""
    return f"{format_count(count)}B" if count >= 1000 else f"{count:g} B"
