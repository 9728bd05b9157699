"""Walk the ATen graph of `torch.export` and let every operator say what it does to the dimensions."""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from . import contractions, moves  # noqa: F401  (they register their rules)
from .atoms import Atoms, Labels, Value
from .operators import RULES, Call, barrier

WRAPPERS = {"wrap_with_autocast": 4, "wrap_with_set_grad_enabled": 1, "tag_activation_checkpoint": 0}


class Untraceable(Exception):
    """torch.export cannot follow this module."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch.export's diagnostics off the user's screen: what matters of them is in our own messages."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    nowhere = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def export(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.export.ExportedProgram:
    """
    Raises:
        Untraceable: torch.export failed, in one line.
    """
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(model, args, dict(kwargs), strict=False)
    except Exception as error:  # torch.export raises anything at all on code it cannot follow
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        branches = "DataDependent" in type(error).__name__
        raise Untraceable(f"its code branches on the values of a tensor ({text})" if branches else text) from error


def walk(
    atoms: Atoms, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], prefix: str = ""
) -> set[str]:
    """Add what the graph of `model` says to `atoms` and return the names of the tensors it uses, below `prefix`.

    Raises:
        Untraceable: torch.export cannot follow the model; `atoms` is unchanged.
    """
    program = export(model, args, kwargs)
    names = dict(program.graph_signature.inputs_to_parameters) | dict(program.graph_signature.inputs_to_buffers)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    first = first_names(model)
    values: list[Value] = []
    used: set[str] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            name = names.get(node.name)
            if name is not None and name in tensors and node.users:
                used.add(prefix + first[id(tensors[name])])
                kernel = any(_is_convolution(user) for user in node.users)
                values.append(parameter(atoms, prefix + first[id(tensors[name])], tensors[name], kernel))
            else:
                values.append(_constant(node.meta.get("val"), name is not None))
    with quiet():  # reading a fake tensor's size may warn too
        outputs = interpret(atoms, program.graph_module, values, prefix)
    atoms.where = None
    what = f"is an output of `{prefix[:-1]}`, whose caller is not traced" if prefix else "is an output of the network"
    for value in outputs:
        for labels in value.labels:
            atoms.freeze(labels, what)
    return used


def first_names(model: nn.Module) -> dict[int, str]:
    """A tied tensor goes by the first of its names."""
    first: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        first.setdefault(id(tensor), name)
    return first


def parameter(atoms: Atoms, name: str, tensor: Tensor, kernel: bool) -> Value:
    """The value of a parameter or buffer: an atom for each position of each dimension, the same at every use."""
    labels: list[Labels | None] = []
    for d, size in enumerate(tensor.shape):
        if size == 1 or (kernel and d > 1):
            labels.append(None)
        elif (name, d) not in atoms.places:
            labels.append(atoms.places.setdefault((name, d), atoms.new(size)))
        else:
            labels.append(atoms.places[name, d])
    return Value(tuple(tensor.shape), labels, weight=True, constant=True, name=name)


def _is_convolution(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and "conv" in node.target._schema.name


def _constant(val: Any, constant: bool) -> Value:
    return Value.fixed(tuple(int(s) for s in val.shape) if isinstance(val, Tensor) else (), constant)


def interpret(atoms: Atoms, graph_module: GraphModule, inputs: list[Value], prefix: str) -> list[Value]:
    """Run the rules over a graph and return the values of its outputs."""
    env: dict[Node, Any] = {}
    given = iter(inputs)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "get_attr":
            attribute = getattr(graph_module, str(node.target), None)
            env[node] = attribute if isinstance(attribute, GraphModule) else _constant(attribute, True)
        elif node.op == "output":
            return [value for n in node.all_input_nodes for value in _values(env[n])]
        else:
            atoms.where = (prefix + _module_of(node)).rstrip(".")
            env[node] = _apply(atoms, node, env, prefix)
    return []


def _values(value: Any) -> list[Value]:
    return (
        [value]
        if isinstance(value, Value)
        else [v for v in value if isinstance(v, Value)]
        if isinstance(value, list)
        else []
    )


def _module_of(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    names = [entry[0] for entry in stack.values()]
    return names[-1] if names else ""


def _apply(atoms: Atoms, node: Node, env: dict[Node, Any], prefix: str) -> Any:
    target: Any = node.target
    args: Any
    kwargs: Any
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
    if target is operator.getitem:
        return args[0][args[1]] if isinstance(args[0], list) else args[0]
    if (name := getattr(target, "__name__", str(target))) in WRAPPERS:
        inner = args[WRAPPERS[name]]
        return interpret(atoms, inner, list(args[WRAPPERS[name] + 1 :]), prefix)
    shapes = _shapes(node.meta.get("val"))
    if not isinstance(target, torch._ops.OpOverload):
        call = Call(str(name), dict(enumerate(args)) | kwargs, shapes)
        return barrier(atoms, call) if shapes else None
    schema = target._schema
    bound = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    bound |= {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
    namespace, _, op = schema.name.partition("::")
    op = op.rstrip("_") if not op.startswith("__") else op
    call = Call(op, bound, shapes)
    handler = RULES.get(op) if namespace == "aten" else None
    if not shapes:  # sizes, assertions: nothing to follow
        return None
    if not call.values():
        return _result([Value.fixed(s, True) for s in shapes], node)
    if handler is None:
        return _result(barrier(atoms, call), node)
    try:
        result = handler(atoms, call)
    except Exception as error:  # a form of the operator that its rule does not know: not understood is not cut
        result = barrier(atoms, call, f"passes through `{op}` in a form that is not known ({type(error).__name__})")
    return _result(result if isinstance(result, list) else [result], node)


def _result(values: list[Value], node: Node) -> Any:
    return values if isinstance(node.meta.get("val"), (list, tuple)) else values[0]


def _shapes(val: Any) -> list[tuple[int, ...]]:
    tensors = val if isinstance(val, (list, tuple)) else [val]
    return [tuple(int(s) for s in t.shape) for t in tensors if isinstance(t, Tensor)]
