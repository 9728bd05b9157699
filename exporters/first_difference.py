"""Find the first node of a file that computes something different from the program it was translated from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from .lowering import LoweredModel
from .parity import NEGLIGIBLE, max_difference

if TYPE_CHECKING:
    import onnx


def describe_first_difference(lowered: LoweredModel, inputs: Sequence[Tensor], output: str, tolerance: float) -> str:
    """Return a sentence about the first node from which a difference reaches the output; "" if there is none."""
    proto = lowered.proto
    expected, modules = _program_values(lowered.program, inputs)
    for name, value in zip(_program_outputs(lowered.program), proto.graph.output, strict=True):  # renamed in the file
        if name in expected:
            expected[value.name], modules[value.name] = expected[name], modules[name]
    comparable = [name for node in proto.graph.node for name in node.output if name in expected]
    actual = _file_values(proto, inputs, comparable)
    differs = {name: _differs(expected[name], actual[name], tolerance) for name in actual}
    producers = {name: node for node in proto.graph.node for name in node.output}
    position = {name: i for i, node in enumerate(proto.graph.node) for name in node.output}
    visited: set[str] = set()
    queue, differing = [output], []
    while queue:  # backwards, while values differ or cannot be compared
        name = queue.pop()
        if name in visited or name not in producers or not differs.get(name, True):
            continue
        visited.add(name)
        differing += [name] * (name in differs)
        queue += producers[name].input
    if not visited:
        return ""
    if not differing:
        start = producers[min(visited, key=lambda name: position[name])]
        return f"The difference begins at or after node {start.name} ({start.op_type})."
    first = min(differing, key=lambda name: position[name])
    node = producers[first]
    module = f" of module {modules[first]}" if modules.get(first) else ""
    return (
        f"The first node that differs is {node.name} ({node.op_type}){module}; its inputs "
        f"({', '.join(n for n in node.input if n)}) agree as far as they can be compared."
    )


def _differs(expected: Tensor, actual: Tensor, tolerance: float) -> bool:
    if expected.shape != actual.shape:  # complex numbers are pairs in ONNX
        return False
    absolute, relative = max_difference(expected, actual)
    return relative > tolerance and absolute > NEGLIGIBLE


@torch.no_grad()
def _program_values(
    program: torch.export.ExportedProgram, inputs: Sequence[Tensor]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Run the program; return the value of each node, and the module whose code contains the node."""
    values: dict[str, Tensor] = {}
    modules: dict[str, str] = {}

    class RecordingInterpreter(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor) and n.op == "call_function":
                values[n.name] = value.detach().clone()
                stack = list((n.meta.get("nn_module_stack") or {}).values())
                modules[n.name] = str(stack[-1][0]).removeprefix("model").removeprefix(".") if stack else ""
            return value

    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    RecordingInterpreter(module).run(*[t.clone() for t in inputs])
    return values, modules


def _program_outputs(program: torch.export.ExportedProgram) -> list[str]:
    specs = program.graph_signature.output_specs
    return [str(spec.arg.name) for spec in specs if spec.kind is torch.export.graph_signature.OutputKind.USER_OUTPUT]


def _file_values(proto: onnx.ModelProto, inputs: Sequence[Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Run the file without onnxruntime's fusions; return the values with these names."""
    import onnx
    import onnxruntime as ort

    if not names:
        return {}
    exposed = onnx.ModelProto()
    exposed.CopyFrom(proto)
    existing = {value.name for value in exposed.graph.output}
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in existing)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(exposed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {i.name: t.numpy() for i, t in zip(session.get_inputs(), inputs, strict=True)}
    return {name: torch.from_numpy(a) for name, a in zip(names, session.run(list(names), feed), strict=True)}
