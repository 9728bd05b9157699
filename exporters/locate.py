"""Where a file begins to differ from the program it was translated from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .parity import LEAST, apart


def locate(program: torch.export.ExportedProgram, proto: Any, leaves: Sequence[Tensor], output: str, tol: float) -> str:
    """The first node, in words, from which a difference reaches this output."""
    right, modules = _values(program, leaves)
    for spec, value in zip(_outputs(program), proto.graph.output, strict=True):  # outputs go by names of their own
        if spec in right:
            right[value.name], modules[value.name] = right[spec], modules[spec]
    here = _intermediate(proto, leaves, [name for node in proto.graph.node for name in node.output if name in right])
    off = {name: _off(right[name], here[name], tol) for name in here}
    nodes = {name: node for node in proto.graph.node for name in node.output}
    order = {name: i for i, node in enumerate(proto.graph.node) for name in node.output}
    seen: set[str] = set()
    waiting, bad = [output], []
    while waiting:  # backwards, as far as values differ or cannot be compared
        name = waiting.pop()
        if name in seen or name not in nodes or not off.get(name, True):
            continue
        seen.add(name)
        bad += [name] * (name in off)
        waiting += nodes[name].input
    if not seen:
        return ""
    if not bad:
        start = nodes[min(seen, key=lambda name: order[name])]
        return f"It begins at or behind node {start.name} ({start.op_type})."
    first = min(bad, key=lambda name: order[name])
    module = f" of module {modules[first]}" if modules.get(first) else ""
    return (
        f"The first node that differs is {nodes[first].name} ({nodes[first].op_type}){module}, whose inputs "
        f"({', '.join(n for n in nodes[first].input if n)}) agree as far as they can be compared."
    )


def _off(right: Tensor, here: Tensor, tol: float) -> bool:
    if right.shape != here.shape:  # complex numbers are pairs in ONNX
        return False
    off, part = apart(right, here)
    return part > tol and off > LEAST


@torch.no_grad()
def _values(
    program: torch.export.ExportedProgram, leaves: Sequence[Tensor]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What every node of the program computes, and the module in whose code it stands."""
    found: dict[str, Tensor] = {}
    modules: dict[str, str] = {}

    class Watching(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor) and n.op == "call_function":
                found[n.name] = value.detach().clone()
                stack = list((n.meta.get("nn_module_stack") or {}).values())
                modules[n.name] = str(stack[-1][0]).removeprefix("model").removeprefix(".") if stack else ""
            return value

    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    Watching(module).run(*[t.clone() for t in leaves])
    return found, modules


def _outputs(program: torch.export.ExportedProgram) -> list[str]:
    specs = program.graph_signature.output_specs
    return [str(spec.arg.name) for spec in specs if spec.kind is torch.export.graph_signature.OutputKind.USER_OUTPUT]


def _intermediate(proto: Any, leaves: Sequence[Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """What the file computes under these names, node by node, without onnxruntime's fusions."""
    import onnx
    import onnxruntime as ort

    watched = onnx.ModelProto()
    watched.CopyFrom(proto)
    have = {value.name for value in watched.graph.output}
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in have)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {i.name: t.numpy() for i, t in zip(session.get_inputs(), leaves, strict=True)}
    wanted = list(names)
    return {n: torch.from_numpy(a) for n, a in zip(wanted, session.run(wanted, feed) if wanted else [], strict=True)}
