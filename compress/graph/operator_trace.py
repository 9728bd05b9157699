"""Trace one run of a model: the rule of every ATen operator says what it does to the dimensions of its tensors.

The run is an ordinary forward pass under a dispatch mode, which sees functional calls, views and in-place operators.
A model whose code looks at the values of activations (`if x.mean() > 0`, or shapes that depend on them) takes one of
several paths, and one run says nothing about the others, so such a model is not traced. In all other models the values
of activations do not matter, so convolutions and matrix products are not computed: they return zeros
(shape_only_kernels.py). A model that does not run on zeros, calls custom operators or writes to its buffers is run
again with real numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from compress.modules import ParameterGuard, clone_tensors, modules_of, scripted_modules, tensors_in

from . import rules  # noqa: F401  (fills the table of rules)
from .activation_groups import CallTrace, ModuleCall, OwnOperator
from .atoms import Atoms, Mark, TracedTensor
from .attribute_sizes import (
    Attribute,
    AttributeSize,
    SizeUse,
    attribute_sizes_in,
    tracked_attributes,
    uses_by_position,
)
from .rules.operator_schema import OperatorSchema, schema_of
from .rules.registry import RULES, OperatorCall, barrier
from .shape_only_kernels import SHAPE_ONLY
from .traced_parameters import TensorNames, trace_parameter

_RUNS = itertools.count()


class Untraceable(Exception):
    """The model cannot be traced; the message says where and why."""


class _ValuesNeeded(Exception):
    """The run may depend on numbers that were not computed."""


class OperatorTrace(NamedTuple):
    """Result of tracing: the names of the tensors that were used, the calls of modules, and how many runs it took."""

    used: set[str]
    calls: CallTrace
    num_runs: int = 1


def trace_operators(
    atoms: Atoms,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    prefix: str = "",
    known: TensorNames | None = None,
) -> OperatorTrace:
    """Run `model`, record its operators in `atoms`, and return the tensors it uses, below `prefix`, and its calls.

    Args:
        atoms: The table that gets the records.
        model: The model, or a part of one; its code may change it.
        args: Positional arguments of the forward pass.
        kwargs: Keyword arguments of the forward pass.
        prefix: What the names of tensors start with.
        known: Parameters and buffers before any run; others are taken as constants. Default: those of now.

    Raises:
        Untraceable: The model's path depends on the values of its input, or it fails; `atoms` is left as it was.
    """
    known = known or TensorNames(model)
    snapshot = atoms.snapshot()
    try:
        return _trace_run(atoms, model, args, kwargs, prefix, shapes_only=True, known=known)
    except Untraceable:
        raise
    except Exception:  # the zeros may be the cause
        atoms.restore_(snapshot)
        return _trace_run(atoms, model, args, kwargs, prefix, shapes_only=False, known=known)._replace(num_runs=2)


def _trace_run(
    atoms: Atoms,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    prefix: str,
    shapes_only: bool,
    known: TensorNames | None = None,
) -> OperatorTrace:
    guard = ParameterGuard([model])
    tracer = _OperatorTracer(atoms, TensorNames(model, prefix, among=known), guard)
    modules = modules_of(model)
    if shapes_only:
        buffers = (b for module in modules.values() for b in module._buffers.values() if b is not None)
        tracer.shapes_only = True
        tracer.buffer_memory = {b.untyped_storage().data_ptr() for b in buffers}
    scripted = scripted_modules(model)
    paths = {id(module): (prefix + name).rstrip(".") for name, module in [*modules.items(), *scripted.items()]}

    def enter(module: nn.Module, args: Any) -> None:
        tracer.module_stack.append(paths.get(id(module), tracer.module_stack[-1]))
        tracer.input_stack.append([tracer.traced(tensor) for tensor in tensors_in(args)])
        if isinstance(module, torch.jit.ScriptModule):
            tracer.freeze(args, f"is read by {tracer.module_stack[-1]}, a scripted module, which cannot be cut")

    def leave(module: nn.Module, _: Any, result: Any) -> None:
        path = tracer.module_stack.pop()
        if isinstance(module, torch.jit.ScriptModule):
            tracer.describe_as_frozen(result, f"is an output of {path}, a scripted module, which cannot be cut")
        call = ModuleCall(tracer.input_stack.pop(), [tracer.traced(tensor) for tensor in tensors_in(result)])
        tracer.calls.calls[path].append(call)
        if isinstance(result, tuple) and len(result) == 2:
            atoms.pair_modules.add(path)

    def add_keyword_inputs(module: nn.Module, args: Any, kwargs: Any) -> None:  # after `enter`, which does not see them
        if kwargs:
            tracer.input_stack[-1].extend(tracer.traced(tensor) for tensor in tensors_in(kwargs))

    args, kwargs = clone_tensors((args, dict(kwargs)))
    inputs = tensors_in((args, kwargs))
    for tensor in inputs:
        tracer.describe(tensor, TracedTensor.fixed(tuple(tensor.shape)))
    handles = [module_hooks.register_module_forward_pre_hook(enter), module_hooks.register_module_forward_hook(leave)]
    handles += [
        module.register_forward_pre_hook(add_keyword_inputs, prepend=True, with_kwargs=True)
        for module in modules.values()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    snapshot = atoms.snapshot()
    try:
        with (
            torch.no_grad(),
            guard,
            torch.random.fork_rng(devices=[]),
            tracked_attributes(model, prefix) as numeric_attributes,
            _PythonAccessWatcher(tracer, numeric_attributes),
            tracer,
        ):
            result = model(*args, **kwargs)
    except Exception as error:
        atoms.restore_(snapshot)  # the records of half a run are incomplete
        if shapes_only or isinstance(error, Untraceable):
            raise
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        where = tracer.module_stack[-1] or "the model"
        raise Untraceable(f"{where} does not run under a dispatch mode ({text})") from error
    finally:
        for handle in handles:
            handle.remove()
        for tensor in inputs:  # they belong to the caller
            _Description.remove_from_(tensor)
    atoms.current_module = None
    atoms.numeric_attributes |= numeric_attributes
    reason = f"is an output of `{prefix[:-1]}`, whose caller is not traced" if prefix else "is an output of the network"
    tracer.freeze(result, reason)
    return OperatorTrace({traced.name for traced in tracer.parameters.values()}, tracer.calls)


@dataclass(frozen=True)
class _Description:
    """The `TracedTensor` of an activation and the time of the operator that produced it.

    It is an attribute of the activation, so that it lives as long as the activation and is copied with it. A module
    may keep an activation until another run, in which the description does not hold.
    """

    traced: TracedTensor
    time: int
    run: int  # number of the run

    def attach_to_(self, tensor: Tensor) -> None:
        tensor._compress_description = self  # type: ignore[attr-defined]

    @staticmethod
    def of(tensor: Tensor) -> _Description | None:
        return getattr(tensor, "_compress_description", None)

    @staticmethod
    def remove_from_(tensor: Tensor) -> None:
        vars(tensor).pop("_compress_description", None)


class _OperatorTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keep the description of every live tensor and pass the descriptions of each operator's inputs to its rule."""

    def __init__(self, atoms: Atoms, names: TensorNames, guard: ParameterGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.atoms, self.names, self.guard = atoms, names, guard
        self.parameters: dict[int, TracedTensor] = {}  # parameters and buffers that were used, by id
        self.module_stack = [""]
        self.calls = CallTrace()
        self.input_stack: list[list[TracedTensor]] = []  # of the modules in `module_stack`
        self.run = next(_RUNS)
        self.time = 0  # number of operators so far
        self.last_write: dict[int, int] = {}  # memory -> time of the last in-place operator that wrote to it
        self.shapes_only = False  # return zeros from costly operators
        self.buffer_memory: set[int] = set()  # memory of the model's buffers, if `shapes_only`

    def describe(self, tensor: Tensor, traced: TracedTensor) -> None:
        """Attach a description to an activation."""
        if tensor not in self.names:
            _Description(traced, self.time, self.run).attach_to_(tensor)

    def freeze(self, values: Any, reason: str) -> None:
        """Exclude all dimensions of these tensors from cutting."""
        self.atoms.current_module = None  # the reason says where
        for tensor in tensors_in(values):
            for atom_ids in self.traced(tensor).atom_ids:
                self.atoms.freeze(atom_ids, reason)

    def describe_as_frozen(self, values: Any, reason: str) -> None:
        """Describe these tensors by dimensions of fixed size, even if atoms are known for them."""
        self.atoms.current_module = None
        for tensor in tensors_in(values):
            atom_ids = [self.atoms.new_frozen_atoms(size, reason) if size > 1 else None for size in tensor.shape]
            self.describe(tensor, TracedTensor(tuple(tensor.shape), atom_ids))

    def traced(self, tensor: Tensor, is_kernel: bool = False) -> TracedTensor:
        """Return the description of a tensor."""
        name = self.names.get(tensor)
        if name is None:
            description = _Description.of(tensor)
            if description is None or description.run != self.run:
                return TracedTensor.fixed(tuple(tensor.shape), is_constant=True)
            traced = description.traced
            # if a view of it was written to since, it holds other numbers along the same dimensions
            up_to_date = self.last_write.get(tensor.untyped_storage().data_ptr(), 0) <= description.time
            return traced if up_to_date else TracedTensor(traced.shape, list(traced.atom_ids))
        if id(tensor) not in self.parameters:
            self.parameters[id(tensor)] = trace_parameter(self.atoms, name, tensor, is_kernel)
        return self.parameters[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        op = "alias" if schema.op == "as_strided" and _keeps_strides(args) else schema.op
        arguments = {**schema.defaults, **dict(zip(schema.argument_names, args, strict=False)), **kwargs}
        arguments = {name: self._traced_argument(arg, schema.is_convolution) for name, arg in arguments.items()}
        if schema.depends_on_values:
            for tensor in tensors_in((args, kwargs)):
                if op != "index" or tensor.dtype in (torch.bool, torch.uint8):  # a mask selects as many as are set
                    self.check_constant(tensor, func)
        call = OperatorCall(op, arguments, [])
        tensors = call.tensors()
        result = self._shape_only_result(schema, args, kwargs, tensors) if self.shapes_only else None
        if result is None:
            if schema.written_arguments:
                self.guard.before_operator(func, args, kwargs)
            result = func(*args, **kwargs)
        self.time += 1
        for i in schema.written_arguments:
            if i < len(args) and isinstance(args[i], Tensor):
                self.last_write[args[i].untyped_storage().data_ptr()] = self.time
        outputs = [t for t in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(t, Tensor)]
        if outputs:
            self.atoms.current_module = self.module_stack[-1]
            call.shapes = [tuple(t.shape) for t in outputs]
            traced_outputs = self._apply_rule(schema.namespace, call, tensors)
            operator = OwnOperator(call.op, [*tensors, *traced_outputs], traced_outputs)
            self.calls.add_operator(self.module_stack, operator)
            for tensor, traced in zip(outputs, traced_outputs, strict=True):
                self.describe(tensor, traced)
        return result

    def _shape_only_result(self, schema: OperatorSchema, args: Any, kwargs: Any, tensors: list[TracedTensor]) -> Any:
        """Return zeros in place of a costly operator's result; None if it has to be run.

        Raises:
            _ValuesNeeded: The run may use the numbers that were not computed in a way that is not seen.
        """
        if all(tensor.is_constant for tensor in tensors):
            return None
        written = (args[i] for i in schema.written_arguments if i < len(args))
        if schema.namespace != "aten" or any(
            isinstance(t, Tensor) and t.untyped_storage().data_ptr() in self.buffer_memory for t in written
        ):
            raise _ValuesNeeded
        kernel = SHAPE_ONLY.get(schema.op)
        return None if kernel is None or kwargs else kernel(*args)

    def check_constant(self, tensor: Tensor, func: Any) -> None:
        """Check that no input can change the values of a tensor that the model's code looks at.

        Raises:
            Untraceable: An input can.
        """
        if not self.traced(tensor).is_constant:
            where = self.module_stack[-1] or "the model"
            raise Untraceable(f"the code of {where} depends on the values of a tensor (`{func}`)")

    def _traced_argument(self, arg: Any, is_kernel: bool) -> Any:
        if isinstance(arg, Tensor):
            return self.traced(arg, is_kernel)
        if isinstance(arg, (list, tuple)) and any(isinstance(a, Tensor) for a in arg):
            return [self.traced(a) if isinstance(a, Tensor) else a for a in arg]
        return arg

    def _apply_rule(self, namespace: str, call: OperatorCall, tensors: list[TracedTensor]) -> list[TracedTensor]:
        if not tensors:
            return [TracedTensor.fixed(shape, is_constant=True) for shape in call.shapes]
        rule = RULES.get(call.op) if namespace == "aten" else None
        if rule is None:
            return barrier(self.atoms, call)
        try:
            result = rule(self.atoms, call)
            outputs = result if isinstance(result, list) else [result]
            return outputs + [TracedTensor.fixed(shape) for shape in call.shapes[len(outputs) :]]
        except Exception as error:  # arguments that the rule does not support: what is not understood is not cut
            reason = f"passes through `{call.op}` in a form that is not known ({type(error).__name__}: {error})"
            return barrier(self.atoms, call, reason)


class _PythonAccessWatcher(TorchFunctionMode):
    """See what no operator shows: values of tensors that go to Python, and attention without an explicit scale.

    Attention without a fused kernel is decomposed into products, in which the root of the width is just a number.
    """

    def __init__(self, tracer: _OperatorTracer, numeric_uses: set[Attribute]) -> None:
        super().__init__()
        self.tracer, self.numeric_uses = tracer, numeric_uses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            self.tracer.check_constant(args[0], f"Tensor.{func.__name__}")
        if func is F.scaled_dot_product_attention and (kwargs or {}).get("scale") is None:
            query = args[0] if args else (kwargs or {})["query"]
            self.tracer.atoms.mark(self.tracer.traced(query).atom_ids[-1], Mark.DIVIDED_BY_ROOT)
        if sizes := attribute_sizes_in(args, kwargs):
            return self._call_with_attribute_sizes(func, args, kwargs or {}, sizes)
        return func(*args, **(kwargs or {}))

    def _call_with_attribute_sizes(self, func: Any, args: Any, kwargs: Any, sizes: list[AttributeSize]) -> Any:
        """Call a function with sizes from attributes, and record which dimensions have these sizes.

        A size that no dimension has is a number that the function computes with, or a position.
        """
        atoms = self.tracer.atoms
        tracked = [size for size in sizes if size.numeric_uses is self.numeric_uses]  # others come from a cache
        num_hints, atoms.sizes_are_attributes = len(atoms.size_hints), True
        try:
            result = func(*args, **kwargs)
        finally:
            atoms.sizes_are_attributes = False
        uses = uses_by_position(func, args, result, lambda tensor: self.tracer.traced(tensor).atom_ids)
        if uses is None:  # match sizes by value with those that the rules of the operators saw
            uses = [
                SizeUse(size, hint.atom_ids)
                for hint in atoms.size_hints[num_hints:]
                for size in tracked
                if size == hint.size
            ]
        atoms.size_uses += [use for use in uses if use.size.numeric_uses is self.numeric_uses]
        used = {id(use.size) for use in uses}
        for size in tracked:
            if size.is_plain and id(size) not in used:
                self.numeric_uses.update(size.attributes)
        return result


def _keeps_strides(args: Any) -> bool:
    """Return whether `as_strided` changes nothing but strides of dimensions of size one."""
    tensor, size, stride = args[0], args[1], args[2]
    strides = [(old, new) for n, old, new in zip(size, tensor.stride(), stride, strict=False) if n != 1]
    return tuple(tensor.shape) == tuple(size) and all(old == new for old, new in strides)
