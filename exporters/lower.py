"""From a model to an ONNX graph: torch.export, torch's translation, onnxslim, names that people can read."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .call import Call, ExportError, Flat
from .operators import table

LIMIT = 2**31 - 1  # bytes of a protobuf
LOGGERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "onnxslim", "root")
AXES = ("batch", "channels", "height", "width")


@dataclass
class Lowered:
    """A graph, the program it was translated from (its values go by the same names), and how both are called."""

    proto: Any
    program: torch.export.ExportedProgram
    flat: Flat
    outputs: list[str]


def lower(
    model: nn.Module,
    call: Call,
    *,
    dynamic_batch: bool,
    dynamic_size: bool,
    opset: int | None,
    slim: bool,
    half: bool,
) -> Lowered:
    """Translate a model; the graph has passed onnx's checker.

    Raises:
        ExportError: it does not run on the example, its code cannot be followed, an operator has no translation, the
            batch or the size cannot be dynamic, or the opset is too old or too new.
    """
    import onnx

    if dynamic_batch and call.batch is None:
        raise ExportError(
            "dynamic_batch: it is not plain which dimension of the example inputs is the batch: expected tensors "
            f"alone, all with the same first dimension; got {[list(t.shape) for t in call.leaves]}. Export with "
            "dynamic_batch=False"
        )
    outputs = Flat(model, call).outputs()
    flat = Flat(model, call, half)
    with (
        quiet(),
        sdpa_kernel(SDPBackend.MATH),
    ):  # others lay their results out in ways that views cannot be taken of later
        program = _followed(flat, call, dynamic_batch, dynamic_size)
        translated = _translated(program, len(call.names), len(outputs), opset)
        proto = translated.model_proto
    _check_opset(proto, opset)
    if slim:
        proto = _slimmed(proto)
    _rename_(proto, call.names, outputs)
    if proto.ByteSize() > LIMIT:
        raise ExportError(f"the graph has {proto.ByteSize() / 2**30:.1f} GiB, and one file holds 2: export parts of it")
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:
        raise ExportError(f"onnx's checker refuses the graph: {error}") from error
    program = translated.exported_program
    assert program is not None
    return Lowered(proto, program, flat, outputs)


def opset_of(proto: Any) -> int:
    return next(int(o.version) for o in proto.opset_import if o.domain in ("", "ai.onnx"))


def nodes_of(graph: Any) -> Iterator[Any]:
    """All nodes, also those in the bodies of others."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in [attribute.g, *attribute.graphs]:
                yield from nodes_of(body)


def _followed(flat: Flat, call: Call, batch: bool, size: bool) -> torch.export.ExportedProgram:
    """The model's code as a graph of ATen operators."""
    leaves = tuple(t if not batch or len(t) > 1 else torch.cat([t, t]) for t in call.leaves)  # one is taken as fixed
    free = torch.export.Dim.DYNAMIC
    axes = tuple({0: free} if batch else {} for _ in leaves)
    if size:
        axes = tuple(a | ({2: free, 3: free} if t.ndim == 4 else {}) for a, t in zip(axes, leaves, strict=True))
    try:
        with torch.no_grad():
            return torch.export.export(flat, leaves, dynamic_shapes=(axes,), strict=False)
    except Exception as error:
        text, where = str(error).strip(), _module_of(error, flat.model)
        if ("onstraint" in text and "specialized" in text) or ("marked" in text and "dynamic" in text):
            name, other = ("dynamic_size", "dynamic_size=False") if size else ("dynamic_batch", "dynamic_batch=False")
            line = next((part.strip(" -") for part in text.splitlines() if "specialized" in part), text.splitlines()[0])
            raise ExportError(
                f"{name}: the model's code holds a dimension that was to be free: {line} Take sizes from the tensors "
                f"(x.shape[0]) instead of writing them down, or export with {other}"
            ) from error
        if "data-dependent" in text:
            raise ExportError(
                f"{where}: its code branches on the values of its activations, which a graph cannot: "
                f"{text.splitlines()[0]} Export the parts that do not, or write it with torch.where or torch.cond"
            ) from error
        first = text.splitlines()[0] if text else ""
        raise ExportError(f"{where}: torch.export cannot follow its code: {type(error).__name__}: {first}") from error


def _translated(program: torch.export.ExportedProgram, inputs: int, outputs: int, opset: int | None) -> Any:
    """The program in ONNX operators; its ends have names that no value inside has."""
    try:
        return torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            opset_version=opset,
            custom_translation_table=table(),
            input_names=[f"<input {i}>" for i in range(inputs)],
            output_names=[f"<output {i}>" for i in range(outputs)],
        )
    except torch.onnx.OnnxExporterError as error:
        text = "\n".join(str(e) for e in _chain(error))
        found = re.search(r"translating node %(\w+) :.*?target=([\w.]+)", text)
        if found is None:
            why = str(list(_chain(error))[-1]).strip().splitlines()[0]
            raise ExportError(f"torch.onnx does not translate the model: {why}") from error
        name, operator = found[1], re.sub(r"^torch\.ops\.|\.default$", "", found[2])
        raise ExportError(
            f"{_module_with(program, name, operator)}: the operator {operator} has no translation to ONNX. Write that "
            "module with other operators, or export the model without it"
        ) from error


def _check_opset(proto: Any, asked: int | None) -> None:
    made = opset_of(proto)
    if asked is not None and made != asked:
        age = "old" if asked < made else "new"
        raise ExportError(
            f"opset: {asked} is too {age} for this model; torch {torch.__version__} and onnx write it in {made}. Ask "
            f"for opset={made}, or leave opset out"
        )


def _slimmed(proto: Any) -> Any:
    import onnxslim

    try:
        with quiet():
            slim = onnxslim.slim(proto)
    except Exception as error:
        raise ExportError(f"onnxslim fails: {type(error).__name__}: {error}. Export with slim=False") from error
    assert slim is not None
    return slim


def _rename_(proto: Any, inputs: list[str], outputs: list[str]) -> None:
    """Ends and dimensions as people call them, tensors as the model does, and nothing about files of this machine."""
    graph = proto.graph
    fresh = dict(zip([i.name for i in graph.input], inputs, strict=True))
    fresh |= dict(zip([o.name for o in graph.output], outputs, strict=True))
    taken = {name for node in nodes_of(graph) for name in [*node.input, *node.output]} | {*inputs, *outputs}
    fresh |= {name: f"{name}<inside>" for name in taken if name in {*inputs, *outputs} and name not in fresh}
    for tensor in graph.initializer:
        short = tensor.name.removeprefix("model.")
        if short != tensor.name and short not in taken:
            fresh[tensor.name] = short
    for node in nodes_of(graph):
        node.input[:] = [fresh.get(name, name) for name in node.input]
        node.output[:] = [fresh.get(name, name) for name in node.output]
    for value in [*graph.input, *graph.output, *graph.value_info, *graph.initializer]:
        value.name = fresh.get(value.name, value.name)
    symbols: dict[str, str] = {}
    for value in graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param:
                symbols.setdefault(dim.dim_param, AXES[axis] if axis < len(AXES) else f"axis_{axis}")
    for value in [*graph.input, *graph.output, *graph.value_info]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\b\w+\b", lambda m: symbols.get(m[0], m[0]), dim.dim_param)
    for part in [*nodes_of(graph), *graph.input, *graph.output, *graph.value_info, *graph.initializer, graph, proto]:
        del part.metadata_props[:]  # source files, and stack traces


def _module_of(error: BaseException, model: nn.Module) -> str:
    """The innermost module in whose code an error arose."""
    names = {id(module): name for name, module in model.named_modules()}
    frame, found = error.__traceback__, ""
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        found = names.get(id(owner), "") or found
        frame = frame.tb_next
    return found or type(model).__name__


def _module_with(program: torch.export.ExportedProgram, name: str, operator: str) -> str:
    """The module in whose code an operator stands: by the node's name, or by what was taken apart into it."""
    last = operator.rpartition("::")[2].split(".")[1] if "." in operator else operator
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    for fits in (
        lambda n: n.name == name,
        lambda n: last in str(n.target),
        lambda n: name.rstrip("_0123456789") in n.name,
    ):
        for node in filter(fits, nodes):
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            if stack:
                return str(stack[-1][0]).removeprefix("model").removeprefix(".") or "the model"
    return "the model"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What the exporter thinks aloud is not for users; what is wrong comes as an exception."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    fast = torch.backends.mha.get_fastpath_enabled()
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.backends.mha.set_fastpath_enabled(False)  # one operator for a whole layer, which ONNX does not have
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
