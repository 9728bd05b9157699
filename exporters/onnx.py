"""Export to ONNX: write a model to a file that is compared with it and timed.

report = compress.exporters.onnx.export(pruned.model, "model.onnx", example_inputs, dense=model)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compress.recipe import Timing

from .bench import Bench, bench
from .errors import ExportError, ParityError
from .export_report import ExportReport, Int8, Network
from .file_writer import OnnxFileWriter
from .first_difference import describe_first_difference
from .flat_model import CallSignature, FlatModel, input_variants
from .int8 import quantise
from .lowering import LoweredModel, LoweringOptions, lower_to_onnx
from .metadata import ExportMetadata, read_metadata
from .parity import HALF_TOLERANCE, TOLERANCE, Difference, check_parity
from .requirements import MissingExtra, need_onnx
from .runtime import OnnxRunner

__all__ = [
    "Bench",
    "Difference",
    "ExportError",
    "ExportMetadata",
    "ExportReport",
    "Int8",
    "MissingExtra",
    "Network",
    "OnnxRunner",
    "ParityError",
    "bench",
    "check",
    "export",
    "quantise",
    "read_metadata",
]

SIZE_OFFSET = (5, 3)  # added to height and width to check a dynamic size: odd, and different


def export(
    model: nn.Module,
    path: str | Path,
    example_inputs: Any,
    *,
    dynamic_batch: bool = True,
    dynamic_size: bool = False,
    opset: int | None = None,
    slim: bool = True,
    half: bool = False,
    check: bool = True,
    tolerance: float | None = None,
    samples: Iterable[Any] = (),
    dense: nn.Module | None = None,
    about: ExportMetadata | None = None,
    timing: Timing | None = None,
) -> ExportReport:
    """Write `model` to an ONNX file, compare the file with it and time both; the model is not changed.

    Args:
        example_inputs: what the model is called with, in the forms of `find_groups`. File and model are compared on
            it and on random inputs like it; if the batch is dynamic, in batches of 1, 2 and 7.
        dynamic_batch: let the file take batches of any size.
        dynamic_size: let the file take images of any height and width.
        opset: version of the ONNX operator set; default: the one torch prefers.
        slim: simplify the graph with onnxslim.
        half: store and compute in half precision; inputs and outputs stay float32.
        check: compare the file with the model before it is written.
        tolerance: largest difference of an output, relative to its largest number (default: 1e-4; with `half`, 1e-2).
        samples: further inputs to compare on, in the form of the example.
        dense: the model before pruning; the report then includes its size and times, measured in turn.
        about: metadata to write into the file.
        timing: how often and on which batch size both are timed.

    Raises:
        MissingExtra: the packages of the `onnx` extra are not installed.
        ExportError: the model cannot be exported with these options, or it does not have fewer parameters than `dense`.
        ParityError: the file computes something different; the message names the output and the first node that
            differs.
        OSError: the file cannot be written.
    """
    options = LoweringOptions(dynamic_batch, dynamic_size, opset, slim, half)
    if tolerance is None:
        tolerance = HALF_TOLERANCE if half else TOLERANCE

    def compare(signature: CallSignature, runner: OnnxRunner, lowered: LoweredModel) -> list[Difference]:
        return _compare_with_model(FlatModel(model, signature), runner, options, samples, tolerance, lambda: lowered)

    metadata, timing = about or ExportMetadata(), timing or Timing()
    writer = OnnxFileWriter(model, path, example_inputs, options, tolerance, dense, metadata, timing)
    return writer.write(compare if check else None)


def check(
    model: nn.Module,
    path: str | Path,
    example_inputs: Any,
    *,
    tolerance: float | None = None,
    samples: Iterable[Any] = (),
) -> list[Difference]:
    """Compare a file with the model, as `export` does before it writes one; return the difference of each output.

    Args:
        example_inputs, samples, tolerance: as in `export`.

    Raises:
        MissingExtra: the packages of the `onnx` extra are not installed.
        ParityError: the file computes something different; the message names the output and the first node that
            differs.
        ExportError: onnxruntime does not load the file, or its inputs differ from the model's.
    """
    need_onnx()
    import onnx

    signature, runner = CallSignature.from_example(model, example_inputs), OnnxRunner(path)
    proto = onnx.load(path)
    axes = [{i for i, size in enumerate(shape) if not isinstance(size, int)} for shape in runner.input_shapes.values()]
    options = LoweringOptions(
        dynamic_batch=any(0 in dynamic for dynamic in axes),
        dynamic_size=any({2, 3} & dynamic for dynamic in axes),
        slim=False,
        half=any(t.data_type == onnx.TensorProto.FLOAT16 for t in proto.graph.initializer),
    )
    if tolerance is None:
        tolerance = HALF_TOLERANCE if options.half else TOLERANCE

    def lower_again() -> LoweredModel:
        lowered = lower_to_onnx(model, signature, options)
        return LoweredModel(proto, lowered.program, lowered.output_names)

    return _compare_with_model(FlatModel(model, signature), runner, options, samples, tolerance, lower_again)


def _compare_with_model(
    flat_model: FlatModel,
    runner: OnnxRunner,
    options: LoweringOptions,
    samples: Iterable[Any],
    tolerance: float,
    get_lowered: Callable[[], LoweredModel],
) -> list[Difference]:
    """Compare on the example, random inputs and samples; `get_lowered` is called only if a difference is too large."""
    signature, output_names = flat_model.signature, flat_model.output_names()
    images = [t for t in signature.tensors if t.ndim == 4]
    sizes = [(t.shape[2] + SIZE_OFFSET[0], t.shape[3] + SIZE_OFFSET[1]) for t in images[:1]]
    batches = [*input_variants(signature, options.dynamic_batch, sizes if options.dynamic_size else [])]
    batches += [(f"sample {i}", signature.tensors_of_call(sample)) for i, sample in enumerate(samples)]

    def describe_origin(tensors: list[Tensor], output: str) -> str:
        lowered = get_lowered()
        value = lowered.proto.graph.output[output_names.index(output)]
        return describe_first_difference(lowered, tensors, value.name, tolerance)

    return check_parity(flat_model, runner, output_names, batches, tolerance, describe_origin)
