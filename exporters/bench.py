"""bench: files against each other in onnxruntime, one run of each in turn."""

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

from compress.timing import Ratio, compare, ratio

from .call import ExportError
from .extra import need_onnx
from .report import said_size
from .runtime import Runner


@dataclass
class Entry:
    """One file's numbers; the ratio is its time as a part of the first file's, with a 95 % interval."""

    path: str
    bytes: int
    latency_ms: float  # median
    latency_spread_ms: float  # half of the distance between the quartiles
    ratio: list[float]


@dataclass
class Bench:
    """Files that were run in turn."""

    files: list[Entry]
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
        for entry in self.files:
            part = Ratio(entry.ratio[0], entry.ratio[1], entry.ratio[2], self.repeats)
            times = f"{entry.latency_ms:.3g} ± {entry.latency_spread_ms:.1g} ms"
            first = entry is self.files[0]
            texts = ("", "") if first else (str(part), f"{1 / part.value:.2f}x")
            table.add_row(Text(entry.path), said_size(entry.bytes), times, *texts)
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

    The input's shape is that of the files, its free dimensions filled by `batch_size` or by `shape`, the whole shape of
    the first input.

    Raises:
        MissingExtra: the packages of the `onnx` extra are not installed.
        ExportError: a file does not load, a dimension is not known, or the files have other inputs.
        ValueError: `repeats` is less than one.
    """
    need_onnx("onnxruntime")
    if missing := [str(path) for path in paths if not Path(path).is_file()]:
        raise ExportError(f"{missing[0]}: no such file")
    runners = [Runner(path, threads) for path in paths]
    first = runners[0]
    shapes = {n: _filled(n, s, batch_size, shape if n == first.names[0] else None) for n, s in first.shapes.items()}
    for path, runner in zip(paths, runners, strict=True):
        same = [runner.dtypes[n] for n in runner.names] == [first.dtypes[n] for n in first.names]
        pairs = zip(runner.shapes.values(), shapes.values(), strict=False)
        if not same or not all(_fits(theirs, ours) for theirs, ours in pairs):
            raise ExportError(
                f"{path}: expected the inputs of {paths[0]}, {shapes}; got {runner.shapes}. Files can be compared on "
                "the same input only"
            )
    inputs = tuple(_random(shapes[name], first.dtypes[name]) for name in first.names)
    times = compare(runners, inputs, repeats)
    entries = []
    for path, time in zip(paths, times, strict=True):
        part = ratio(times[0], time)
        size = Path(path).stat().st_size
        entries.append(Entry(str(path), size, time.median, time.spread, [part.value, part.low, part.high]))
    return Bench(entries, shapes, first.threads, repeats)


def _filled(name: str, shape: Sequence[Any], batch: int, given: Sequence[int] | None) -> list[int]:
    if given is not None:
        if not _fits(shape, given):
            raise ExportError(f"--input: expected a shape of {name}, {list(shape)}; got {list(given)}")
        return list(given)
    free = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
    if any(axis > 0 for axis in free):
        raise ExportError(f"{name}: its shape is {list(shape)}: say which with --input, such as 1,3,224,224")
    return [batch if axis in free else int(size) for axis, size in enumerate(shape)]


def _fits(shape: Sequence[Any], sizes: Sequence[int]) -> bool:
    return len(shape) == len(sizes) and all(
        not isinstance(s, int) or s == size for s, size in zip(shape, sizes, strict=True)
    )


def _random(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(list(shape), generator=random).to(dtype)
    return torch.zeros(list(shape), dtype=dtype)  # indices: the first is always there
