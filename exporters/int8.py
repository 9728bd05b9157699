"""int8: a file quantised after training by onnxruntime's tools, ranges measured on data, with its own accuracy."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compress.discover import as_call
from compress.files import write_whole
from compress.recipe import Timing
from compress.timing import batched, compare, ratio

from .call import ExportError
from .extra import need_onnx
from .lower import quiet
from .place import place
from .report import Int8
from .runtime import Runner

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
    """Write a float file anew with weights and activations in 8 bits, by channel, as QuantizeLinear pairs (QDQ).

    `calibration` gives inputs in the forms that the model is called with, of which so many batches are read; ranges are
    the smallest and largest values seen. `evaluate` measures a network that is called like the model, such as
    `lambda network: task.evaluate(network, val)`: it is asked about the float file and about the int8 one.

    Raises:
        MissingExtra: the packages of the `onnx` extra are not installed.
        ExportError: there is nothing to calibrate on, its inputs do not fit, or the result does not run.
        OSError: the file cannot be written there.
    """
    need_onnx("onnx", "onnxruntime")
    import onnx
    from onnxruntime import quantization as q

    target, timing, whole = place(Path(path)), timing or Timing(), Runner(source)
    inputs = list(islice(calibration, batches))
    if not inputs:
        raise ExportError("calibration: expected at least one batch; got none")
    feeds = [_tensors(batch) for batch in inputs]
    whole.run(feeds[0])  # what does not fit is said in our words

    class Reader(q.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rest = iter(feeds)

        def get_next(self) -> dict[str, Any] | None:
            leaves = next(self.rest, None)
            return None if leaves is None else dict(zip(whole.names, (t.numpy() for t in leaves), strict=True))

    with tempfile.TemporaryDirectory() as folder, quiet():
        ready, made = Path(folder) / "ready.onnx", Path(folder) / "int8.onnx"
        q.shape_inference.quant_pre_process(str(source), str(ready), skip_symbolic_shape=True)
        q.quantize_static(str(ready), str(made), Reader(), quant_format=q.QuantFormat.QDQ, per_channel=True)
        proto = onnx.load(made)
    del proto.metadata_props[:]
    proto.metadata_props.extend(onnx.load(source, load_external_data=False).metadata_props)
    data = proto.SerializeToString()
    runner = Runner(data)
    example = batched(inputs[0], timing.batch_size)
    before, times = compare([whole, runner], example, timing.repeats)
    part = ratio(before, times)
    report = Int8(
        path=str(target),
        bytes=len(data),
        nodes=len(proto.graph.node),
        calibrated_on=sum(len(leaves[0]) for leaves in feeds),
        latency_ms=times.median,
        latency_spread_ms=times.spread,
        float_latency_ms=before.median,
        ratio=[part.value, part.low, part.high],
        metrics=evaluate(runner) if evaluate else {},
        float_metrics=evaluate(whole) if evaluate else {},
    )
    write_whole(target, data)
    return report


def _tensors(inputs: Any) -> list[Tensor]:
    return [t.detach().cpu().contiguous() for t in pytree.tree_leaves(as_call(inputs)) if isinstance(t, Tensor)]
