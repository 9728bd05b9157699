"""Write one ONNX file: translate the model, check the file, time it, and write it if all of that succeeds."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.budget import LatencyRatio, compare_latency, latency_ratio, repeat_to_batch
from compress.recipe import Timing
from compress.storage import write_atomic

from .detection_match import DetectionMatch
from .errors import ExportError
from .export_report import ExportReport, Network
from .flat_model import CallSignature, FlatModel
from .lowering import LoweredModel, LoweringOptions, lower_to_onnx, opset_of
from .metadata import ExportMetadata
from .parity import TOLERANCE, Difference
from .requirements import need_onnx
from .runtime import OnnxRunner

if TYPE_CHECKING:
    import onnx

CheckFile = Callable[[CallSignature, OnnxRunner, LoweredModel], list[Difference] | DetectionMatch]


@dataclass(frozen=True)
class _TimedNetwork:
    """A network in PyTorch and as a file, and where its times are reported."""

    stats: Network
    model: nn.Module
    runner: OnnxRunner


@dataclass(frozen=True)
class OnnxFileWriter:
    """Writes a model to an ONNX file: the model, the options, and what the file and its report say about it."""

    model: nn.Module
    path: str | Path
    example_inputs: Any
    options: LoweringOptions = field(default_factory=LoweringOptions)
    tolerance: float = TOLERANCE
    dense: nn.Module | None = None
    metadata: ExportMetadata = field(default_factory=ExportMetadata)
    timing: Timing = field(default_factory=Timing)

    def write(self, check: CheckFile | None) -> ExportReport:
        """Write the file and return its report.

        Args:
            check: compares the file with the model and raises ParityError if they differ; None skips it.

        Raises:
            MissingExtra: the packages of the `onnx` extra are not installed.
            ExportError: the model cannot be exported with these options, or has no fewer parameters than the dense one.
            ParityError: the file computes something different from the model.
            OSError: the file cannot be written.
        """
        need_onnx()
        target = writable_path(Path(self.path))
        signature = CallSignature.from_example(self.model, self.example_inputs)
        lowered = lower_to_onnx(self.model, signature, self.options)
        shapes = {i.name: _shape_of(i) for i in lowered.proto.graph.input}
        metadata = self.metadata.entries(shapes)
        for key, text in metadata.items():
            lowered.proto.metadata_props.add(key=key, value=text)
        data = lowered.proto.SerializeToString()
        runner = OnnxRunner(data)
        result = check(signature, runner, lowered) if check else []
        differences = result if isinstance(result, list) else []
        can_batch = signature.batch_size is not None and self.options.dynamic_batch
        report = ExportReport(
            path=str(target),
            opset=opset_of(lowered.proto),
            half=self.options.half,
            inputs=shapes,
            outputs=lowered.output_names,
            file=_network_stats(lowered.proto, len(data)),
            tolerance=self.tolerance,
            max_abs_diff=max((d.abs for d in differences), default=None),
            max_rel_diff=max((d.rel for d in differences), default=None),
            differences=[vars(d) for d in differences],
            threads=runner.threads,
            batch_size=self.timing.batch_size if can_batch else signature.batch_size or 1,
            repeats=self.timing.repeats,
            metadata=metadata,
            detections=result if isinstance(result, DetectionMatch) else None,
        )
        networks = [_TimedNetwork(report.file, self.model, runner)]
        if self.dense is not None:
            networks.append(self._lower_dense_(self.dense, signature, report))
        _measure_(report, networks, signature)
        write_atomic(target, data)
        return report

    def _lower_dense_(self, dense: nn.Module, signature: CallSignature, report: ExportReport) -> _TimedNetwork:
        """Translate the dense model with the same options; add its size to the report.

        Raises:
            ExportError: the compact model does not have fewer parameters.
        """
        proto = lower_to_onnx(dense, signature, self.options).proto
        data = proto.SerializeToString()
        report.dense = _network_stats(proto, len(data))
        if report.file.parameters >= report.dense.parameters:  # not bytes: graph and metadata may outweigh a small cut
            raise ExportError(
                "the compact file is not smaller than the dense one: "
                f"{report.file.parameters} and {report.dense.parameters} parameters, "
                f"{report.file.bytes} and {len(data)} bytes. Was `model` pruned, and is `dense` the model it was "
                "pruned from?"
            )
        return _TimedNetwork(report.dense, dense, OnnxRunner(data))


def writable_path(path: Path) -> Path:
    """Return the path after checking that a file can be written there.

    Raises:
        IsADirectoryError: the path is a directory.
        FileNotFoundError: its directory does not exist.
        OSError: its directory is not writable.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path}: expected the name of a file such as model.onnx; it is a directory")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{path}: expected an existing directory; {path.parent} does not exist. Create it first"
        )
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise OSError(f"{path}: cannot write in {path.parent} ({reason}); choose another directory") from error
    return path


def _measure_(report: ExportReport, networks: list[_TimedNetwork], signature: CallSignature) -> None:
    """Time all networks in turn, in onnxruntime and in PyTorch; add times and MACs to the report."""
    args, kwargs = signature.arguments(signature.tensors)
    inputs: Any = kwargs if kwargs else args
    if report.batch_size != signature.batch_size:
        inputs = repeat_to_batch(inputs, report.batch_size)
    models = [FlatModel(network.model, signature).model for network in networks]
    times = compare_latency([*(network.runner for network in networks), *models], inputs, report.repeats)
    onnx_times, torch_times = times[: len(networks)], times[len(networks) :]
    for network, model, onnx_time, torch_time in zip(networks, models, onnx_times, torch_times, strict=True):
        stats = network.stats
        stats.latency_ms, stats.latency_spread_ms = onnx_time.median, onnx_time.spread
        stats.torch_latency_ms, stats.torch_latency_spread_ms = torch_time.median, torch_time.spread
        stats.macs = _count_macs(model, signature)
    if len(networks) > 1:
        report.ratio = _as_list(latency_ratio(onnx_times[1], onnx_times[0]))
        report.torch_ratio = _as_list(latency_ratio(torch_times[1], torch_times[0]))


def _as_list(ratio: LatencyRatio) -> list[float]:
    return [ratio.value, ratio.low, ratio.high]


@torch.no_grad()
def _count_macs(model: nn.Module, signature: CallSignature) -> int | None:
    """Return the MACs of one example as torch counts them; None if it counts none."""
    from torch.utils.flop_counter import FlopCounterMode  # it imports triton

    tensors = signature.tensors if signature.batch_size is None else [t[:1] for t in signature.tensors]
    args, kwargs = signature.arguments(tensors)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the fused operator of a transformer layer is not counted
    try:
        with FlopCounterMode(display=False) as counter:
            model(*args, **kwargs)
    except Exception:  # a model that does not run on one example
        return None
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
    return counter.get_total_flops() // 2 or None


def _network_stats(proto: onnx.ModelProto, size: int) -> Network:
    counts = [math.prod(t.dims) for t in proto.graph.initializer]
    return Network(size, len(proto.graph.node), sum(counts), len(counts))


def _shape_of(value: onnx.ValueInfoProto) -> list[int | str]:
    return [d.dim_param or int(d.dim_value) for d in value.type.tensor_type.shape.dim]
