"""The exporter of `export: onnx`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch import nn

from compress.recipe import Export
from compress.training import Task

from . import onnx
from .base import Exporter, ExportJob, register_exporter
from .export_report import ExportReport
from .flat_model import CallSignature
from .lowering import LoweringOptions, lower_to_onnx
from .metadata import ExportMetadata
from .requirements import need_onnx

NUM_CALIBRATION_BATCHES = 16
NUM_COMPARED_BATCHES = 1


@register_exporter("onnx")
class OnnxExporter(Exporter):
    """Writes ONNX files, in float32, half precision or int8, that are compared with the network in onnxruntime."""

    file_name = "model.onnx"
    int8_file_name = "model.int8.onnx"

    def check_installed(self) -> None:
        need_onnx()

    def try_export(self, model: nn.Module, settings: Export, example_inputs: Any) -> None:
        lower_to_onnx(
            model, CallSignature.from_example(model, example_inputs), LoweringOptions(**_graph_options(settings))
        )

    def export(self, job: ExportJob) -> ExportReport:
        """Write the compact network, compare the file with it and measure both.

        The file is compared on the example inputs, on random inputs and on a validation batch.
        """
        task, val = job.task, job.task.val
        report = onnx.export(
            job.compact,
            job.path,
            job.example_inputs,
            **_graph_options(job.settings),
            samples=_first_inputs(task, val, NUM_COMPARED_BATCHES) if job.settings.dynamic_batch else (),
            dense=job.dense,
            about=ExportMetadata.from_loader(task.train if val is None else val, plan=job.plan, recipe=job.recipe),
            timing=job.timing,
        )
        if job.int8_path is not None:
            report.int8 = onnx.quantise(
                job.path,
                job.int8_path,
                _first_inputs(task, task.train, NUM_CALIBRATION_BATCHES),
                evaluate=None if val is None else lambda network: task.evaluate(network, val),
                timing=job.timing,
            )
        return report


def _graph_options(settings: Export) -> dict[str, Any]:
    """Return the settings that determine the graph, as keyword arguments of `onnx.export`."""
    return {name: getattr(settings, name) for name in ("dynamic_batch", "dynamic_size", "opset", "slim", "half")}


def _first_inputs(task: Task, loader: Iterable[Any] | None, count: int) -> list[Any]:
    """Return the model's inputs of the first batches."""
    return [task.inputs(batch) for batch in islice(loader, count)] if loader is not None else []
