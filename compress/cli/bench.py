"""compress bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import JsonOption, console, error_console, parse_shape


def bench(
    files: Annotated[
        list[Path], typer.Argument(help="ONNX files with the same inputs; the others are compared with the first")
    ],
    batch: Annotated[int, typer.Option("--batch", help="batch size, for files that accept any", min=1)] = 1,
    shape: Annotated[
        str | None, typer.Option("--input", help="shape of the input, for files that accept several")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="threads of onnxruntime", show_default="as many as torch", min=1)
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="runs of each file, in turn", min=1)] = 50,
    as_json: JsonOption = False,
) -> None:
    """Compare the latency of ONNX files in onnxruntime; the files are run in turn.

    Example: compress bench dense.onnx compact.onnx --threads 1
    """
    from compress.exporters import onnx

    sizes = None if shape is None else parse_shape(shape)
    with error_console.status("timing"):
        result = onnx.bench(files, batch_size=batch, repeats=repeats, threads=threads, shape=sizes)
    print(result.to_json()) if as_json else console.print(result)
