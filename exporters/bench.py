"""Compare the latency of ONNX files in onnxruntime, one run of each in turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from compress.budget import LatencyRatio, compare_latency, latency_ratio

from .errors import ExportError
from .export_report import format_bytes
from .requirements import need_onnx
from .runtime import OnnxRunner


@dataclass
class FileTiming:
    """Size and latency of one file."""

    path: str
    bytes: int
    latency_ms: float  # median
    latency_spread_ms: float  # half of the interquartile range
    ratio: list[float]  # time as a fraction of the first file's: median and 95 % interval


@dataclass
class Bench:
    """Timings of several files on the same input."""

    files: list[FileTiming]
    inputs: dict[str, list[int]]
    threads: int
    repeats: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def __rich__(self) -> Table:
        shapes = ", ".join(f"{name}{shape}" for name, shape in self.inputs.items())
        title = f"{shapes}; {self.threads} thread{'s' * (self.threads > 1)}, {self.repeats} runs of each in turn"
        table = Table(title=Text(title), title_justify="left")
        for column in ("file", "size", "latency", "of the first", "speed-up"):
            table.add_column(column, justify="left" if column == "file" else "right", overflow="fold")
        for file in self.files:
            ratio = LatencyRatio(file.ratio[0], file.ratio[1], file.ratio[2], self.repeats)
            latency = f"{file.latency_ms:.3g} ± {file.latency_spread_ms:.1g} ms"
            is_first = file is self.files[0]
            comparison = ("", "") if is_first else (str(ratio), f"{1 / ratio.value:.2f}x")
            table.add_row(Text(file.path), format_bytes(file.bytes), latency, *comparison)
        return table


def bench(
    paths: Sequence[str | Path],
    *,
    batch_size: int = 1,
    repeats: int = 50,
    threads: int | None = None,
    shape: Sequence[int] | None = None,
) -> Bench:
    """Time files on the same random input, one run of each in turn.

    Args:
        batch_size: size of the first dimension where the files leave it dynamic.
        repeats: runs of each file.
        threads: for onnxruntime; default: as many as torch uses.
        shape: full shape of the first input, needed if other dimensions are dynamic.

    Raises:
        MissingExtra: the packages of the `onnx` extra are not installed.
        ExportError: a file does not exist or does not load, a dimension is unknown, or the files' inputs differ.
        ValueError: `repeats` is less than one.
    """
    need_onnx("onnxruntime")
    if missing := [str(path) for path in paths if not Path(path).is_file()]:
        raise ExportError(f"{missing[0]}: no such file")
    runners = [OnnxRunner(path, threads) for path in paths]
    first = runners[0]
    shapes = {
        name: _concrete_shape(name, dims, batch_size, shape if name == first.input_names[0] else None)
        for name, dims in first.input_shapes.items()
    }
    for path, runner in zip(paths, runners, strict=True):
        same_dtypes = list(runner.input_dtypes.values()) == list(first.input_dtypes.values())
        pairs = zip(runner.input_shapes.values(), shapes.values(), strict=False)
        if not same_dtypes or not all(_shape_fits(dims, sizes) for dims, sizes in pairs):
            raise ExportError(
                f"{path}: expected the inputs of {paths[0]}, {shapes}; got {runner.input_shapes}. Only files with the "
                "same inputs can be compared"
            )
    inputs = tuple(_random_input(shapes[name], first.input_dtypes[name]) for name in first.input_names)
    times = compare_latency(runners, inputs, repeats)
    files = []
    for path, time in zip(paths, times, strict=True):
        ratio = latency_ratio(times[0], time)
        size = Path(path).stat().st_size
        files.append(FileTiming(str(path), size, time.median, time.spread, [ratio.value, ratio.low, ratio.high]))
    return Bench(files, shapes, first.threads, repeats)


def _concrete_shape(name: str, dims: Sequence[Any], batch_size: int, shape: Sequence[int] | None) -> list[int]:
    """Return `shape` if it fits the input; otherwise fill a dynamic batch dimension.

    Args:
        dims: sizes of the file's input; names where they are dynamic.

    Raises:
        ExportError: `shape` does not fit, or another dimension is dynamic and `shape` is missing.
    """
    if shape is not None:
        if not _shape_fits(dims, shape):
            raise ExportError(f"--input: expected a shape of {name}, {list(dims)}; got {list(shape)}")
        return list(shape)
    dynamic = [axis for axis, size in enumerate(dims) if not isinstance(size, int)]
    if any(axis > 0 for axis in dynamic):
        raise ExportError(f"{name}: its shape is {list(dims)}: give the sizes with --input, such as 1,3,224,224")
    return [batch_size if axis in dynamic else int(size) for axis, size in enumerate(dims)]


def _shape_fits(dims: Sequence[Any], sizes: Sequence[int]) -> bool:
    return len(dims) == len(sizes) and all(
        not isinstance(dim, int) or dim == size for dim, size in zip(dims, sizes, strict=True)
    )


def _random_input(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(list(shape), generator=generator).to(dtype)
    return torch.zeros(list(shape), dtype=dtype)  # integers are indices; zero is always valid
