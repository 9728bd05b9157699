"""Follow a model through one run: every ATen operator says what it does to the dimensions of its tensors.

The run is a plain forward pass under a dispatch mode, so functional calls, views and in-place operators are all seen.
A model whose code looks at the values of activations (`if x.mean() > 0`, or shapes that depend on them) takes one of
several paths; a run cannot speak for the others, so such a model is not followed. As no value of an activation can
matter then, convolutions and products of matrices are not computed: they give zeros (idle.py). A model that does not
run on those, that calls operators nobody knows or writes to its buffers is run once more, on real numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..walk import modules_of, tensors_of
from . import contractions, moves  # noqa: F401  (they register their rules)
from .atoms import Atoms, Labels, Value
from .idle import IDLE
from .operators import RULES, Call, barrier
from .tensors import tensors_in

LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Untraceable(Exception):
    """The model cannot be followed; the message says where and why."""


class _Needed(Exception):
    """The run may depend on numbers that it was spared."""


def follow(
    atoms: Atoms, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], prefix: str = ""
) -> set[str]:
    """Add what a run of `model` says to `atoms` and return the names of the tensors it uses, below `prefix`.

    Raises:
        Untraceable: the model's path depends on the values of its input, or it fails; `atoms` is as it was.
    """
    before = atoms.state()
    try:
        return _follow(atoms, model, args, kwargs, prefix, idle=True)
    except Untraceable:
        raise
    except Exception:  # it may be that the zeros were to blame
        atoms.restore_(before)
        return _follow(atoms, model, args, kwargs, prefix, idle=False)


def _follow(
    atoms: Atoms, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], prefix: str, idle: bool
) -> set[str]:
    run = _Run(atoms, {number: prefix + name for number, name in first_names(model).items()})
    modules = modules_of(model)
    if idle:
        buffers = (b for module in modules.values() for b in module._buffers.values() if b is not None)
        run.own = {b.untyped_storage().data_ptr() for b in buffers}
    paths = {id(module): (prefix + name).rstrip(".") for name, module in modules.items()}

    def enter(module: nn.Module, _: Any) -> None:
        run.stack.append(paths.get(id(module), run.stack[-1]))

    def leave(module: nn.Module, _: Any, result: Any) -> None:
        left = run.stack.pop()
        if isinstance(result, tuple) and len(result) == 2:
            atoms.pairs.add(left)

    inputs = tensors_in((args, kwargs))
    for tensor in inputs:
        run.give(tensor, Value.fixed(tuple(tensor.shape)))
    handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)]
    before = atoms.state()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _Look(run), run:
            result = model(*args, **kwargs)
    except Exception as error:
        atoms.restore_(before)  # what was said before it stopped is not the whole
        if idle or isinstance(error, Untraceable):
            raise
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise Untraceable(f"{run.stack[-1] or 'the model'} does not run under a dispatch mode ({text})") from error
    finally:
        for handle in handles:
            handle.remove()
        for tensor in inputs:  # they are the caller's
            vars(tensor).pop("_compress_value", None)
    atoms.where = None
    what = f"is an output of `{prefix[:-1]}`, whose caller is not traced" if prefix else "is an output of the network"
    for tensor in tensors_in(result):
        for labels in run.value(tensor).labels:
            atoms.freeze(labels, what)
    return {run.names[number] for number in run.known}


def first_names(model: nn.Module) -> dict[int, str]:
    """A tied tensor goes by the first of its names."""
    return {id(tensor): name for name, tensor in tensors_of(model).items()}


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


@dataclass(frozen=True)
class _Form:
    """What the schema of an operator says."""

    namespace: str
    op: str
    names: tuple[str, ...]
    defaults: dict[str, Any]
    writes: tuple[int, ...]  # arguments that it writes to
    looks: bool
    convolution: bool


@cache
def _form(func: Any) -> _Form:
    namespace, _, op = func._schema.name.partition("::")
    op = op.rstrip("_") if not op.startswith("__") else op
    arguments = func._schema.arguments
    return _Form(
        namespace,
        op,
        tuple(a.name for a in arguments),
        {a.name: a.default_value for a in arguments if a.has_default_value()},
        tuple(i for i, a in enumerate(arguments) if a.is_write),
        bool(LOOKS & set(func.tags)),
        "conv" in op,
    )


class _Run(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the value of every tensor that is alive, and hands each operator's values to its rule."""

    def __init__(self, atoms: Atoms, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.atoms, self.names = atoms, names
        self.known: dict[int, Value] = {}  # of parameters and buffers
        self.stack = [""]
        self.time = 0
        self.writes: dict[int, int] = {}  # memory -> when an in-place operator last wrote to it
        self.own: set[int] | None = None  # memory of buffers, where costly operators are spared their arithmetic

    def give(self, tensor: Tensor, value: Value) -> None:
        if id(tensor) not in self.names:
            tensor._compress_value = (value, self.time)  # type: ignore[attr-defined]  # lives as long as the tensor

    def value(self, tensor: Tensor, kernel: bool = False) -> Value:
        name = self.names.get(id(tensor))
        if name is None:
            found, time = getattr(tensor, "_compress_value", (None, 0))
            if found is None:
                return Value.fixed(tuple(tensor.shape), constant=True)
            # written to since, through a view: it holds other numbers now, along the same dimensions
            fresh = self.writes.get(tensor.untyped_storage().data_ptr(), 0) <= time
            return found if fresh else Value(found.shape, list(found.labels))
        if id(tensor) not in self.known:
            self.known[id(tensor)] = parameter(self.atoms, name, tensor, kernel)
        return self.known[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        form = _form(func)
        op = "alias" if form.op == "as_strided" and _same_strides(args) else form.op
        bound = {**form.defaults, **dict(zip(form.names, args, strict=False)), **kwargs}
        bound = {name: self._valued(v, form.convolution) for name, v in bound.items()}
        if form.looks:
            for tensor in tensors_in((args, kwargs)):
                if op != "index" or tensor.dtype in (torch.bool, torch.uint8):  # a mask picks as many as are set
                    self.look(tensor, func)
        call = Call(op, bound, [])
        values = call.values()
        result = self._spared(form, args, kwargs, values) if self.own is not None else None
        if result is None:
            result = func(*args, **kwargs)
        self.time += 1
        for i in form.writes:
            if i < len(args) and isinstance(args[i], Tensor):
                self.writes[args[i].untyped_storage().data_ptr()] = self.time
        outputs = [t for t in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(t, Tensor)]
        if outputs:
            self.atoms.where = self.stack[-1]
            call.shapes = [tuple(t.shape) for t in outputs]
            for tensor, value in zip(outputs, self._apply(form.namespace, call, values), strict=True):
                self.give(tensor, value)
        return result

    def _spared(self, form: _Form, args: Any, kwargs: Any, values: list[Value]) -> Any:
        """What a costly operator returns, without its arithmetic; None if it has to be run.

        Raises:
            _Needed: numbers that an operator was spared may come back in a way that is not seen.
        """
        if all(value.constant for value in values):
            return None
        assert self.own is not None
        written = (args[i] for i in form.writes if i < len(args))
        if form.namespace != "aten" or any(
            isinstance(t, Tensor) and t.untyped_storage().data_ptr() in self.own for t in written
        ):
            raise _Needed
        spare = IDLE.get(form.op)
        return None if spare is None or kwargs else spare(*args)

    def look(self, tensor: Tensor, func: Any) -> None:
        """The model's code looks at the values of a tensor: harmless only if no input can change them.

        Raises:
            Untraceable: an input can.
        """
        if not self.value(tensor).constant:
            where = self.stack[-1] or "the model"
            raise Untraceable(f"the code of {where} depends on the values of a tensor (`{func}`)")

    def _valued(self, arg: Any, kernel: bool) -> Any:
        if isinstance(arg, Tensor):
            return self.value(arg, kernel)
        if isinstance(arg, (list, tuple)) and any(isinstance(a, Tensor) for a in arg):
            return [self.value(a) if isinstance(a, Tensor) else a for a in arg]
        return arg

    def _apply(self, namespace: str, call: Call, values: list[Value]) -> list[Value]:
        if not values:
            return [Value.fixed(shape, constant=True) for shape in call.shapes]
        rule = RULES.get(call.op) if namespace == "aten" else None
        if rule is None:
            return barrier(self.atoms, call)
        try:
            result = rule(self.atoms, call)
            found = result if isinstance(result, list) else [result]
            return found + [Value.fixed(shape) for shape in call.shapes[len(found) :]]
        except Exception as error:  # a form of the operator that its rule does not know: not understood is not cut
            text = f"passes through `{call.op}` in a form that is not known ({type(error).__name__}: {error})"
            return barrier(self.atoms, call, text)


class _Look(TorchFunctionMode):
    """Sees what no operator shows: values of tensors that leave for Python, and the scale of attention.

    Attention that runs on no fused kernel falls into products, among which the root of the width is a mere number.
    """

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            self.run.look(args[0], f"Tensor.{func.__name__}")
        if func is F.scaled_dot_product_attention and (kwargs or {}).get("scale") is None:
            query = args[0] if args else (kwargs or {})["query"]
            self.run.atoms.mark(self.run.value(query).labels[-1], "rooted")
        return func(*args, **(kwargs or {}))


def _same_strides(args: Any) -> bool:
    """Whether `as_strided` leaves its tensor as it is but for the strides of dimensions of size one."""
    tensor, size, stride = args[0], args[1], args[2]
    real = [(a, b) for n, a, b in zip(size, tensor.stride(), stride, strict=False) if n != 1]
    return tuple(tensor.shape) == tuple(size) and all(a == b for a, b in real)
