"""ONNX: a compact model as a file that is proved equal to it, and timed.

report = compress.exporters.onnx.export(pruned.model, "model.onnx", example_inputs, dense=model)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from compress.files import write_whole
from compress.recipe import Timing
from compress.timing import batched, compare, ratio

from .about import About, plan_hash, read_metadata
from .bench import Bench, bench
from .call import Call, ExportError, Flat, variants
from .extra import MissingExtra, need_onnx
from .int8 import quantise
from .locate import locate
from .lower import Lowered, lower, opset_of
from .match import Matched
from .parity import HALF_TOLERANCE, TOLERANCE, Difference, ParityError, gate
from .place import place
from .report import ExportReport, Int8, Network
from .runtime import Runner

__all__ = [
    "About",
    "Bench",
    "Difference",
    "ExportError",
    "ExportReport",
    "Int8",
    "MissingExtra",
    "Network",
    "ParityError",
    "Runner",
    "bench",
    "check",
    "export",
    "plan_hash",
    "quantise",
    "read_metadata",
]

OTHER = (5, 3)  # by how much the height and width differ that a dynamic size is tried on: odd ones, too


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
    about: About | None = None,
    timing: Timing | None = None,
) -> ExportReport:
    """Write `model` as an ONNX file that was compared with it and timed; the model itself is not changed.

    `example_inputs` is what the model is called with, in the forms of `find_groups`; it and random inputs like it are
    run through file and model, in batches of 1, 2 and 7 where the batch is dynamic. `samples` are further inputs to
    compare on, in the example's form. With the `dense` model the report has its size and times, too, measured in turn.
    `half` has weights in half precision, inputs and outputs stay float32. `dynamic_size` frees height and width.
    `tolerance` is what an output may be off, as a part of its largest number (default: 1e-4, with `half` 1e-2).

    Raises:
        MissingExtra: the packages of the `onnx` extra are not installed.
        ExportError: the model cannot be exported as asked, or the file is not smaller than that of the dense one.
        ParityError: the file computes something else; it names the output and the first node that differs.
        OSError: the file cannot be written there.
    """
    limit = tolerance if tolerance is not None else HALF_TOLERANCE if half else TOLERANCE

    def compare(call: Call, runner: Runner, lowered: Lowered) -> list[Difference]:
        return _parity(model, call, runner, lowered, samples, limit, dynamic_batch, dynamic_size)

    how: dict[str, Any] = {"dynamic_batch": dynamic_batch, "dynamic_size": dynamic_size, "opset": opset}
    how |= {"slim": slim, "half": half}
    return write(
        model, path, example_inputs, how, compare if check else None, limit, dense=dense, about=about, timing=timing
    )


def write(
    model: nn.Module,
    path: str | Path,
    example_inputs: Any,
    how: dict[str, Any],
    gate: Callable[[Call, Runner, Lowered], list[Difference] | Matched] | None,
    tolerance: float,
    *,
    dense: nn.Module | None = None,
    about: About | None = None,
    timing: Timing | None = None,
) -> ExportReport:
    """Lower `model`, let the file through a gate, time it, write it."""
    need_onnx()
    target, timing, about = place(Path(path)), timing or Timing(), about or About()
    call = Call.of(model, example_inputs)
    lowered = lower(model, call, **how)
    shapes = {i.name: _shape(i) for i in lowered.proto.graph.input}
    metadata = about.entries(shapes)
    for key, text in metadata.items():
        lowered.proto.metadata_props.add(key=key, value=text)
    data = lowered.proto.SerializeToString()
    runner = Runner(data)
    gated = gate(call, runner, lowered) if gate else []
    found = gated if isinstance(gated, list) else []
    report = ExportReport(
        path=str(target),
        opset=opset_of(lowered.proto),
        half=how["half"],
        inputs=shapes,
        outputs=lowered.outputs,
        file=_network(lowered.proto, len(data)),
        tolerance=tolerance,
        max_abs_diff=max((d.abs for d in found), default=None),
        max_rel_diff=max((d.rel for d in found), default=None),
        differences=[vars(d) for d in found],
        threads=runner.threads,
        batch_size=timing.batch_size if call.batch is not None and how["dynamic_batch"] else call.batch or 1,
        repeats=timing.repeats,
        metadata=metadata,
        detections=gated if isinstance(gated, Matched) else None,
    )
    other = None if dense is None else _dense(dense, call, report, how)
    _time_(report, call, timing, (model, runner), None if dense is None or other is None else (dense, other))
    write_whole(target, data)
    return report


def check(
    model: nn.Module,
    path: str | Path,
    example_inputs: Any,
    *,
    tolerance: float | None = None,
    samples: Iterable[Any] = (),
) -> list[Difference]:
    """Compare a file with the model, as `export` does before it writes one; returns how far every output is off.

    Raises:
        ParityError: the file computes something else; it names the output and the first node that differs.
        ExportError: the file is not one of onnxruntime's, or has other inputs.
    """
    need_onnx()
    import onnx

    call, runner = Call.of(model, example_inputs), Runner(path)
    proto = onnx.load(path)
    free = [{i for i, size in enumerate(shape) if not isinstance(size, int)} for shape in runner.shapes.values()]
    how = {"dynamic_batch": any(0 in axes for axes in free), "dynamic_size": any({2, 3} & axes for axes in free)}
    half = any(t.data_type == onnx.TensorProto.FLOAT16 for t in proto.graph.initializer)
    limit = tolerance if tolerance is not None else HALF_TOLERANCE if half else TOLERANCE

    def again() -> Lowered:
        lowered = lower(model, call, opset=None, slim=False, half=half, **how)
        return Lowered(proto, lowered.program, lowered.flat, lowered.outputs)

    return _parity(model, call, runner, again, samples, limit, **how)


def _parity(
    model: nn.Module,
    call: Call,
    runner: Runner,
    lowered: Any,
    samples: Iterable[Any],
    tolerance: float,
    dynamic_batch: bool,
    dynamic_size: bool,
) -> list[Difference]:
    """The gate on the example, on random inputs and on samples; `lowered` may be made when it is needed."""
    flat = Flat(model, call)
    outputs = flat.outputs()
    sizes = [(t.shape[2] + OTHER[0], t.shape[3] + OTHER[1]) for t in call.leaves if t.ndim == 4]
    batches = [*variants(call, dynamic_batch, sizes[:1] if dynamic_size else [])]
    batches += [(f"sample {i}", call.flat(sample)) for i, sample in enumerate(samples)]

    def where(leaves: Any, output: str) -> str:
        at = lowered if isinstance(lowered, Lowered) else lowered()
        return locate(at.program, at.proto, leaves, at.proto.graph.output[outputs.index(output)].name, tolerance)

    return gate(flat, runner, outputs, batches, tolerance, where)


def _dense(dense: nn.Module, call: Call, report: ExportReport, how: dict[str, Any]) -> Runner:
    """The dense network as a file beside, and what the report says of it.

    Raises:
        ExportError: the compact file is not smaller.
    """
    whole = lower(dense, call, **how)
    data = whole.proto.SerializeToString()
    report.dense = _network(whole.proto, len(data))
    if report.file.bytes >= len(data):
        raise ExportError(
            f"the compact file is not smaller than the dense one: {report.file.bytes} and {len(data)} bytes, "
            f"{report.file.parameters} and {report.dense.parameters} parameters. Was `model` cut, and is `dense` the "
            "model it was cut from?"
        )
    return Runner(data)


def _time_(
    report: ExportReport,
    call: Call,
    timing: Timing,
    exported: tuple[nn.Module, Runner],
    dense: tuple[nn.Module, Runner] | None,
) -> None:
    """Fill in times, measured in turn, and multiply-adds."""
    inputs: Any = call.inputs(call.leaves)
    inputs = inputs[1] if inputs[1] else inputs[0]
    if report.batch_size != call.batch:
        inputs = batched(inputs, report.batch_size)
    sides = [(report.file, exported)] + ([(report.dense, dense)] if dense and report.dense else [])
    plain = [Flat(model, call).model for _, (model, _) in sides]
    times = compare([*(runner for _, (_, runner) in sides), *plain], inputs, timing.repeats)
    half = len(sides)
    for i, (side, _) in enumerate(sides):
        assert side is not None
        side.latency_ms, side.latency_spread_ms = times[i].median, times[i].spread
        side.torch_latency_ms, side.torch_latency_spread_ms = times[half + i].median, times[half + i].spread
        side.macs = _macs(plain[i], call)
    if dense:
        parts = ratio(times[1], times[0]), ratio(times[3], times[2])
        report.ratio, report.torch_ratio = ([r.value, r.low, r.high] for r in parts)


@torch.no_grad()
def _macs(model: nn.Module, call: Call) -> int | None:
    """Multiply-adds of one example, as torch counts them; none where it counts nothing."""
    leaves = call.leaves if call.batch is None else [t[:1] for t in call.leaves]
    args, kwargs = call.inputs(leaves)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # a layer in one operator is not counted
    try:
        with FlopCounterMode(display=False) as counter:
            model(*args, **kwargs)
    except Exception:  # of a model that does not run on one example
        return None
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops() // 2 or None


def _network(proto: Any, size: int) -> Network:
    counts = [_count(t.dims) for t in proto.graph.initializer]
    return Network(size, len(proto.graph.node), sum(counts), len(counts))


def _count(dims: Iterable[int]) -> int:
    total = 1
    for size in dims:
        total *= int(size)
    return total


def _shape(value: Any) -> list[int | str]:
    return [d.dim_param or int(d.dim_value) for d in value.type.tensor_type.shape.dim]
