"""ExportReport: what was written, how far it is off, how fast it is; as an object, a table and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compress.report import amount, shown
from compress.timing import Ratio

from .match import Matched


@dataclass
class Network:
    """One network as a file, and its times in onnxruntime and in PyTorch."""

    bytes: int
    nodes: int
    parameters: int
    initialisers: int
    macs: int | None = None  # of one example
    latency_ms: float | None = None  # in onnxruntime; median
    latency_spread_ms: float | None = None  # half of the distance between the quartiles
    torch_latency_ms: float | None = None
    torch_latency_spread_ms: float | None = None


@dataclass
class Int8:
    """The quantised file."""

    path: str
    bytes: int
    nodes: int
    calibrated_on: int  # examples
    latency_ms: float
    latency_spread_ms: float
    float_latency_ms: float  # of the file that was quantised, in turn with this one
    ratio: list[float]  # time as a part of the float file's, and its 95 % interval
    metrics: dict[str, float] = field(default_factory=dict)  # as evaluated in onnxruntime
    float_metrics: dict[str, float] = field(default_factory=dict)  # of the file that was quantised, likewise


@dataclass
class ExportReport:
    """A checked file: its size, its difference from the model, its times."""

    path: str
    opset: int
    half: bool
    inputs: dict[str, list[int | str]]  # name -> shape
    outputs: list[str]
    file: Network
    tolerance: float
    max_abs_diff: float | None  # none if it was not checked
    max_rel_diff: float | None  # relative to the largest number of the output
    differences: list[dict[str, Any]]  # of every output on every input
    threads: int
    batch_size: int
    repeats: int
    dense: Network | None = None
    ratio: list[float] | None = None  # time of the file as a part of the dense one's, and its 95 % interval
    torch_ratio: list[float] | None = None
    int8: Int8 | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    detections: Matched | None = None  # of a complete detector, which is compared by what it finds

    @property
    def latency_ms(self) -> float | None:
        """In onnxruntime; the median."""
        return self.file.latency_ms

    @property
    def speedup(self) -> float | None:
        """Of the file over the dense one in onnxruntime: the median over pairs of runs."""
        return 1 / self.ratio[0] if self.ratio else None

    @property
    def reduction(self) -> float | None:
        """The dense network's multiply-adds over those of the compact one."""
        if self.dense is None or not self.dense.macs or not self.file.macs:
            return None
        return self.dense.macs / self.file.macs

    @property
    def realised(self) -> float | None:
        """The speed-up as a part of the reduction of multiply-adds."""
        return self.speedup / self.reduction if self.speedup and self.reduction else None

    def to_dict(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("latency_ms", "speedup", "reduction", "realised")}
        return asdict(self) | derived

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ExportReport:
        own = {key: value for key, value in data.items() if key in cls.__dataclass_fields__}
        own["file"] = Network(**data["file"])
        own["dense"] = Network(**data["dense"]) if data.get("dense") else None
        own["int8"] = Int8(**data["int8"]) if data.get("int8") else None
        own["detections"] = Matched(**data["detections"]) if data.get("detections") else None
        return cls(**own)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """What, of the dense network, of the compact one, and what is left."""
        dense, file = self.dense, self.file
        found = [
            _row("file", said_size, dense and dense.bytes, file.bytes),
            _row("parameters", amount, dense and dense.parameters, file.parameters),
            _row("MACs", amount, dense and dense.macs, file.macs),
            _row("nodes", str, dense and dense.nodes, file.nodes, share=False),
        ]
        for label, kind in (("onnxruntime", ""), ("PyTorch", "torch_")):
            sides = [_time(side, kind) if side else "" for side in (dense, file)]
            part = self.torch_ratio if kind else self.ratio
            found.append((label, sides[0], sides[1], _part(part)))
        if self.realised is not None:
            text = f"{self.speedup:.2f}x of {self.reduction:.2f}x fewer MACs: {self.realised:.2f}"
            found.append(("speed-up realised", "", text, ""))
        if self.max_abs_diff is not None:
            text = f"{self.max_abs_diff:.1e}, {self.max_rel_diff:.1e} of the largest number"
            found.append(("off the model by", "", text, ""))
        if self.detections is not None:
            found.append(("off mmdet's detections by", "", str(self.detections), ""))
        if self.int8 is not None:
            found.append(
                (
                    "int8: file",
                    f"{said_size(file.bytes)} as float",
                    said_size(self.int8.bytes),
                    f"{self.int8.bytes / file.bytes:.1%}",
                )
            )
            times = f"{self.int8.latency_ms:.3g} ± {self.int8.latency_spread_ms:.1g} ms"
            before = f"{self.int8.float_latency_ms:.3g} ms as float"
            found.append(("int8: onnxruntime", before, times, _part(self.int8.ratio)))
            for metric, value in self.int8.metrics.items():
                was = self.int8.float_metrics.get(metric)
                text = "" if was is None else f"{shown(metric, was)} as float"
                found.append((f"int8: {metric}", text, shown(metric, value), ""))
        return [row for row in found if any(row[1:])]

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


def _row(label: str, say: Any, dense: Any, file: Any, share: bool = True) -> tuple[str, str, str, str]:
    before, after = ("" if value is None else say(value) for value in (dense, file))
    return label, before, after, f"{file / dense:.1%}" if share and dense and file else ""


def _part(ratio: list[float] | None) -> str:
    return str(Ratio(ratio[0], ratio[1], ratio[2], 0)) if ratio else ""


def _time(side: Network, kind: str) -> str:
    median, spread = getattr(side, f"{kind}latency_ms"), getattr(side, f"{kind}latency_spread_ms")
    return "" if median is None else f"{median:.3g} ± {spread:.1g} ms"


def said_size(count: float) -> str:
    return f"{amount(count)}B" if count >= 1000 else f"{count:g} B"
