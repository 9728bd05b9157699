"""Quantize a file to int8 after training, with onnxruntime's tools and ranges measured on data."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compress.budget import compare_latency, latency_ratio, repeat_to_batch
from compress.modules import as_call_inputs
from compress.recipe import Timing
from compress.storage import write_atomic

from .errors import ExportError
from .export_report import Int8
from .file_writer import writable_path
from .lowering import quiet_exporters
from .requirements import need_onnx
from .runtime import OnnxRunner

if TYPE_CHECKING:
    import onnx

Evaluate = Callable[[nn.Module], dict[str, float]]


def quantise(
    source: str | Path,
    path: str | Path,
    calibration: Iterable[Any],
    *,
    batches: int = 16,
    evaluate: Evaluate | None = None,
    timing: Timing | None = None,
) -> Int8:
    """Write a float file with weights and activations in int8, per channel, as QuantizeLinear pairs (QDQ).

    Weights use 7 of the 8 bits. CPUs without VNNI instructions add two products of 8-bit numbers in 16 bits, which
    overflow with 8-bit weights: the same file would be right on one machine and wrong on another.

    Args:
        source: the float file.
        path: where the int8 file is written.
        calibration: yields inputs in the forms that the model is called with; ranges are the smallest and largest
            values on them.
        batches: how many batches of `calibration` are used.
        evaluate: measures a network that is called like the model, for example
            `lambda network: task.evaluate(network, val)`. It is called with the int8 file and with the float file.
        timing: how often and on which batch size both files are timed.

    Raises:
        MissingExtra: the packages of the `onnx` extra are not installed.
        ExportError: there is no calibration batch, its inputs do not fit the file, or the result does not run.
        OSError: the file cannot be written.
    """
    need_onnx("onnx", "onnxruntime")
    target, timing, float_runner = writable_path(Path(path)), timing or Timing(), OnnxRunner(source)
    inputs = list(islice(calibration, batches))
    if not inputs:
        raise ExportError("calibration: expected at least one batch; got none")
    tensors = [_tensors_of(batch) for batch in inputs]
    float_runner.run(tensors[0])  # inputs that do not fit the file raise our error here, not onnxruntime's
    feeds = [dict(zip(float_runner.input_names, (t.numpy() for t in batch), strict=True)) for batch in tensors]
    proto = _quantize(source, feeds)
    data = proto.SerializeToString()
    runner = OnnxRunner(data)
    example = repeat_to_batch(inputs[0], timing.batch_size)
    float_times, times = compare_latency([float_runner, runner], example, timing.repeats)
    ratio = latency_ratio(float_times, times)
    report = Int8(
        path=str(target),
        bytes=len(data),
        nodes=len(proto.graph.node),
        calibrated_on=sum(len(batch[0]) for batch in tensors),
        latency_ms=times.median,
        latency_spread_ms=times.spread,
        float_latency_ms=float_times.median,
        ratio=[ratio.value, ratio.low, ratio.high],
        metrics=evaluate(runner) if evaluate else {},
        float_metrics=evaluate(float_runner) if evaluate else {},
    )
    write_atomic(target, data)
    return report


def _quantize(source: str | Path, feeds: list[dict[str, Any]]) -> onnx.ModelProto:
    """Return the quantized graph of a file, with the file's metadata."""
    import onnx
    from onnxruntime import quantization as q

    class CalibrationReader(q.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.remaining = iter(feeds)

        def get_next(self) -> dict[str, Any] | None:
            return next(self.remaining, None)

    with tempfile.TemporaryDirectory() as folder, quiet_exporters():
        prepared, quantized = Path(folder) / "prepared.onnx", Path(folder) / "int8.onnx"
        q.shape_inference.quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        reader = CalibrationReader()
        q.quantize_static(
            str(prepared), str(quantized), reader, quant_format=q.QuantFormat.QDQ, per_channel=True, reduce_range=True
        )
        proto = onnx.load(quantized)
    del proto.metadata_props[:]
    proto.metadata_props.extend(onnx.load(source, load_external_data=False).metadata_props)
    return proto


def _tensors_of(inputs: Any) -> list[Tensor]:
    return [t.detach().cpu().contiguous() for t in pytree.tree_leaves(as_call_inputs(inputs)) if isinstance(t, Tensor)]
