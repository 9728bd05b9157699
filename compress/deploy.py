"""deploy: from a result to the checked files that a recipe's `export` asks for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from .display import Display
from .plan import Plan
from .preflight import NotReady
from .recipe import Export, Recipe, Timing
from .task import Task

if TYPE_CHECKING:
    from .exporters.report import ExportReport

CALIBRATION = 16  # batches
HOW = ("dynamic_batch", "dynamic_size", "opset", "slim", "half")


def check_export(recipe: Recipe, folder: Path | None) -> None:
    """
    Raises:
        NotReady: there is no working directory for the files.
        MissingExtra: the packages that an export needs are not installed.
    """
    if recipe.export is None:
        return
    if folder is None:
        raise NotReady(
            "export: the file goes into the working directory, and there is none. Give workdir=FOLDER, or leave export "
            "out and call compress.exporters.onnx.export(pruned.model, path, example_inputs)"
        )
    from .exporters.extra import need_onnx

    need_onnx()


def try_export(model: nn.Module, recipe: Recipe, task: Task, example_inputs: Any, display: Display) -> None:
    """Translate the dense model as the recipe asks, and write nothing: what does not work then is known before the run.

    Raises:
        ExportError: it cannot be exported as asked.
    """
    if recipe.export is None or hasattr(task, "export"):
        return
    from .exporters.call import Call
    from .exporters.lower import lower

    with display.bar("trying the export"):
        how = {name: getattr(recipe.export, name) for name in HOW}
        lower(model, Call.of(model, example_inputs), **how)


def deploy(
    pair: tuple[nn.Module, nn.Module],
    asked: Export,
    task: Task,
    example_inputs: Any,
    path: Path,
    int8: Path | None,
    *,
    plan: Plan,
    recipe: dict[str, Any],
    timing: Timing,
) -> ExportReport:
    """Write the compact one of a pair of networks, dense and compact, and an int8 file if there is a path for it.

    The file is compared on the example inputs, on random ones and on a validation batch.

    Raises:
        ExportError: the model cannot be exported as asked, or the file computes something else.
        OSError: a file cannot be written.
    """
    from .exporters import onnx as exporter

    if own := getattr(task, "export", None):  # a model that is more than a function of its inputs
        made: ExportReport = own(pair, asked, path, plan=plan, recipe=recipe, timing=timing)
        return made
    val = task.val
    report: ExportReport = exporter.export(
        pair[1],
        path,
        example_inputs,
        **{name: getattr(asked, name) for name in HOW},
        samples=_inputs(task, val, 1) if asked.dynamic_batch else (),
        dense=pair[0],
        about=exporter.About.of_loader(task.train if val is None else val, plan=plan, recipe=recipe),
        timing=timing,
    )
    if int8 is not None:
        report.int8 = exporter.quantise(
            path,
            int8,
            _inputs(task, task.train, CALIBRATION),
            evaluate=None if val is None else lambda network: task.evaluate(network, val),
            timing=timing,
        )
    return report


def _inputs(task: Task, loader: Iterable[Any] | None, count: int) -> list[Any]:
    """What the model is called with for the first batches."""
    return [task.inputs(batch) for batch in islice(loader, count)] if loader is not None else []
