"""Translate a model to an ONNX graph: torch.export, torch.onnx, onnxslim, then readable names."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .custom_ops import translation_table
from .errors import ExportError
from .flat_model import CallSignature, FlatModel

if TYPE_CHECKING:
    import onnx

MAX_PROTOBUF_BYTES = 2**31 - 1
NOISY_LOGGERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "onnxslim", "root")
AXIS_NAMES = ("batch", "channels", "height", "width")


@dataclass(frozen=True)
class LoweringOptions:
    """Options of the translation, as `compress.exporters.onnx.export` describes them."""

    dynamic_batch: bool = True
    dynamic_size: bool = False
    opset: int | None = None
    slim: bool = True
    half: bool = False


@dataclass
class LoweredModel:
    """An ONNX graph and the program it was translated from; values have the same names in both."""

    proto: onnx.ModelProto
    program: torch.export.ExportedProgram
    output_names: list[str]


def lower_to_onnx(model: nn.Module, signature: CallSignature, options: LoweringOptions) -> LoweredModel:
    """Translate a model to a graph that passes onnx's checker.

    Raises:
        ExportError: the model does not run on the example, torch.export cannot trace it, an operator has no
            translation, batch or size cannot be dynamic, or the opset is too old or too new.
    """
    import onnx

    if options.dynamic_batch and signature.batch_size is None:
        raise ExportError(
            "dynamic_batch: cannot tell which dimension of the example inputs is the batch: expected only tensors, all "
            f"with the same first dimension; got {[list(t.shape) for t in signature.tensors]}. Export with "
            "dynamic_batch=False"
        )
    output_names = FlatModel(model, signature).output_names()
    flat_model = FlatModel(model, signature, options.half)
    # The other attention kernels return memory layouts of which later operators cannot take views.
    with quiet_exporters(), sdpa_kernel(SDPBackend.MATH):
        program = _export_program(flat_model, signature, options)
        translated = _translate(program, len(signature.names), len(output_names), options.opset)
        proto = translated.model_proto
    _check_opset(proto, options.opset)
    if options.slim:
        proto = _slim(proto)
    _rename_values_(proto, signature.names, output_names)
    if proto.ByteSize() > MAX_PROTOBUF_BYTES:
        raise ExportError(
            f"the graph has {proto.ByteSize() / 2**30:.1f} GiB; a file holds at most 2. Export parts of the model"
        )
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:
        raise ExportError(f"onnx's checker rejects the graph: {error}") from error
    program = translated.exported_program
    assert program is not None
    return LoweredModel(proto, program, output_names)


def opset_of(proto: onnx.ModelProto) -> int:
    """Return the version of the standard operator set that the graph uses."""
    return next(int(o.version) for o in proto.opset_import if o.domain in ("", "ai.onnx"))


def nodes_of(graph: Any) -> Iterator[Any]:
    """Yield all nodes of a graph, including those in subgraphs of other nodes."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in [attribute.g, *attribute.graphs]:
                yield from nodes_of(body)


def _export_program(
    flat_model: FlatModel, signature: CallSignature, options: LoweringOptions
) -> torch.export.ExportedProgram:
    """Trace the model's code to a graph of ATen operators."""
    batch, size = options.dynamic_batch, options.dynamic_size
    # torch.export treats a dimension of size one as fixed.
    tensors = tuple(t if not batch or len(t) > 1 else torch.cat([t, t]) for t in signature.tensors)
    dynamic = torch.export.Dim.DYNAMIC
    axes = tuple({0: dynamic} if batch else {} for _ in tensors)
    if size:
        axes = tuple(a | ({2: dynamic, 3: dynamic} if t.ndim == 4 else {}) for a, t in zip(axes, tensors, strict=True))
    try:
        with torch.no_grad():
            return torch.export.export(flat_model, tensors, dynamic_shapes=(axes,), strict=False)
    except Exception as error:
        text, module = str(error).strip(), _module_raising(error, flat_model.model)
        first_line = text.splitlines()[0] if text else ""
        if ("onstraint" in text and "specialized" in text) or ("marked" in text and "dynamic" in text):
            option = "dynamic_size" if size else "dynamic_batch"
            line = next((part.strip(" -") for part in text.splitlines() if "specialized" in part), first_line)
            raise ExportError(
                f"{option}: the model's code fixes a dimension that should be dynamic: {line} Take sizes from the "
                f"tensors (x.shape[0]) instead of writing constants, or export with {option}=False"
            ) from error
        if "data-dependent" in text:
            raise ExportError(
                f"{module}: its code branches on the values of its activations, which a graph cannot do: "
                f"{first_line} Export the parts that do not, or use torch.where or torch.cond"
            ) from error
        raise ExportError(
            f"{module}: torch.export cannot trace its code: {type(error).__name__}: {first_line}"
        ) from error


def _translate(program: torch.export.ExportedProgram, inputs: int, outputs: int, opset: int | None) -> Any:
    """Translate the program to ONNX operators; inputs and outputs get names that no inner value has."""
    try:
        return torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            opset_version=opset,
            custom_translation_table=translation_table(),
            input_names=[f"<input {i}>" for i in range(inputs)],
            output_names=[f"<output {i}>" for i in range(outputs)],
        )
    except torch.onnx.OnnxExporterError as error:
        text = "\n".join(str(e) for e in _causes(error))
        failed_node = re.search(r"translating node %(\w+) :.*?target=([\w.]+)", text)
        if failed_node is None:
            reason = str(list(_causes(error))[-1]).strip().splitlines()[0]
            raise ExportError(f"torch.onnx cannot translate the model: {reason}") from error
        name, operator = failed_node[1], re.sub(r"^torch\.ops\.|\.default$", "", failed_node[2])
        module = _module_of_node(program, name, operator)
        raise ExportError(
            f"{module}: the operator {operator} has no translation to ONNX. Write the module with other operators, or "
            "export the model without it"
        ) from error


def _check_opset(proto: onnx.ModelProto, requested: int | None) -> None:
    """
    Raises:
        ExportError: the graph is written in another opset than the requested one.
    """
    actual = opset_of(proto)
    if requested is not None and actual != requested:
        age = "old" if requested < actual else "new"
        raise ExportError(
            f"opset: {requested} is too {age} for this model; torch {torch.__version__} and onnx write it in {actual}. "
            f"Use opset={actual}, or leave opset out"
        )


def _slim(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Simplify the graph with onnxslim.

    Raises:
        ExportError: onnxslim fails.
    """
    import onnxslim

    try:
        with quiet_exporters():
            slim: onnx.ModelProto | None = onnxslim.slim(proto)
    except Exception as error:
        raise ExportError(f"onnxslim fails: {type(error).__name__}: {error}. Export with slim=False") from error
    assert slim is not None
    return slim


def _rename_values_(proto: onnx.ModelProto, inputs: list[str], outputs: list[str]) -> None:
    """Give inputs, outputs, dimensions and weights readable names; remove metadata about source files."""
    graph = proto.graph
    new_names = dict(zip([i.name for i in graph.input], inputs, strict=True))
    new_names |= dict(zip([o.name for o in graph.output], outputs, strict=True))
    used = {name for node in nodes_of(graph) for name in [*node.input, *node.output]} | {*inputs, *outputs}
    new_names |= {name: f"{name}<inside>" for name in used if name in {*inputs, *outputs} and name not in new_names}
    for tensor in graph.initializer:
        short = tensor.name.removeprefix("model.")
        if short != tensor.name and short not in used:
            new_names[tensor.name] = short
    for node in nodes_of(graph):
        node.input[:] = [new_names.get(name, name) for name in node.input]
        node.output[:] = [new_names.get(name, name) for name in node.output]
    for value in [*graph.input, *graph.output, *graph.value_info, *graph.initializer]:
        value.name = new_names.get(value.name, value.name)
    symbols: dict[str, str] = {}
    for value in graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param:
                symbols.setdefault(dim.dim_param, AXIS_NAMES[axis] if axis < len(AXIS_NAMES) else f"axis_{axis}")
    for value in [*graph.input, *graph.output, *graph.value_info]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\b\w+\b", lambda m: symbols.get(m[0], m[0]), dim.dim_param)
    for part in [*nodes_of(graph), *graph.input, *graph.output, *graph.value_info, *graph.initializer, graph, proto]:
        del part.metadata_props[:]  # source files, and stack traces


def _module_raising(error: BaseException, model: nn.Module) -> str:
    """Return the innermost module whose code raised the error."""
    names = {id(module): name for name, module in model.named_modules()}
    frame, innermost = error.__traceback__, ""
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        innermost = names.get(id(owner), "") or innermost
        frame = frame.tb_next
    return innermost or type(model).__name__


def _module_of_node(program: torch.export.ExportedProgram, name: str, operator: str) -> str:
    """Return the module whose code calls an operator.

    The node is found by its name, else by its operator, else by the operator that was decomposed into it.
    """
    short_name = operator.rpartition("::")[2].split(".")[1] if "." in operator else operator
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    for matches in (
        lambda n: n.name == name,
        lambda n: short_name in str(n.target),
        lambda n: name.rstrip("_0123456789") in n.name,
    ):
        for node in filter(matches, nodes):
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            if stack:
                return str(stack[-1][0]).removeprefix("model").removeprefix(".") or "the model"
    return "the model"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and the chain of its causes."""
    while error is not None:
        yield error
        error = error.__cause__


@contextlib.contextmanager
def quiet_exporters() -> Iterator[None]:
    """Silence logs, warnings and prints of the export libraries; their errors are raised as exceptions anyway."""
    levels = {name: logging.getLogger(name).level for name in NOISY_LOGGERS}
    fastpath = torch.backends.mha.get_fastpath_enabled()
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.backends.mha.set_fastpath_enabled(False)  # a fused operator that ONNX does not have
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
