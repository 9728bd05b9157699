"""Export of a pruned network with the exporter that a recipe names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from compress.errors import NotReady
from compress.progress import ProgressDisplay
from compress.recipe import Recipe
from compress.surgery import Plan
from compress.training import Task

if TYPE_CHECKING:  # imported when something is exported: it takes time to load
    from compress.exporters import ExportJob, ExportReport


def check_export(recipe: Recipe, workdir: Path | None) -> None:
    """Check that the recipe's export can be written.

    Raises:
        NotReady: there is no working directory for the files.
        MissingExtra: the packages that the export needs are not installed.
    """
    if recipe.export is None:
        return
    if workdir is None:
        raise NotReady(
            "export: the file is written to the working directory, and there is none. Give workdir=FOLDER, or leave "
            "export out and call compress.exporters.onnx.export(pruned.model, path, example_inputs)"
        )
    from compress.exporters import get_exporter

    get_exporter(recipe.export.format).check_installed()


def try_export(model: nn.Module, recipe: Recipe, task: Task, example_inputs: Any, display: ProgressDisplay) -> None:
    """Translate the dense model without writing a file, so that problems are found before the run.

    Raises:
        ExportError: the model cannot be exported as the recipe says.
    """
    if recipe.export is None or task.has_own_export:
        return
    from compress.exporters import get_exporter

    with display.bar("trying the export"):
        get_exporter(recipe.export.format).try_export(model, recipe.export, example_inputs)


def export_network(job: ExportJob) -> ExportReport:
    """Write the compact network to a file that was compared with it and measured.

    Raises:
        ExportError: the model cannot be exported with these settings, or the file computes something else.
        OSError: a file cannot be written.
    """
    if job.task.has_own_export:  # the model is more than a function of its inputs
        report: ExportReport = job.task.export(
            (job.dense, job.compact), job.settings, job.path, plan=job.plan, recipe=job.recipe, timing=job.timing
        )
        return report
    from compress.exporters import get_exporter

    return get_exporter(job.settings.format).export(job)


def export_result(
    dense: nn.Module,
    compact: nn.Module,
    recipe: Recipe,
    task: Task,
    example_inputs: Any,
    plan: Plan,
    folder: Path,
) -> ExportReport:
    """Write the files of the recipe's export to a working directory.

    Raises:
        ExportError: the model cannot be exported as the recipe says, or the file computes something else.
        OSError: a file cannot be written.
    """
    from compress.exporters import ExportJob, get_exporter

    assert recipe.export is not None
    exporter = get_exporter(recipe.export.format)
    job = ExportJob(
        dense=dense,
        compact=compact,
        settings=recipe.export,
        task=task,
        example_inputs=example_inputs,
        plan=plan,
        recipe=recipe.to_dict(),
        timing=recipe.timing,
        path=folder / exporter.file_name,
        int8_path=folder / exporter.int8_file_name if recipe.export.int8 else None,
    )
    return export_network(job)
