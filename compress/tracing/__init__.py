"""How groups are found: what the model's operators do to the dimensions of its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ..shell import shell
from .atoms import Atoms, Term
from .dependency import walk_dependency
from .follow import Untraceable, first_names, follow


class TraceError(ValueError):
    """The model does not run on the example inputs."""


@dataclass
class Part:
    """A module that was traced, with the inputs it was traced on: what a proof has to run."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    training: bool = False


@dataclass
class Trace:
    atoms: Atoms
    parts: list[Part] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@contextlib.contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Run in eval mode, or in training mode with layers (norms, dropout) in eval, and put every flag back.

    Flags are set one by one: some libraries' `train()` does more than set them.
    """
    before = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in before:
            module.training = training and any(True for _ in module.children())
        yield
    finally:
        for module, flag in before:
            module.training = flag


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
    """Follow the model in eval mode; also in training mode where that uses parameters which eval mode does not.

    Raises:
        TraceError: the model does not run on these inputs.
    """
    found = Trace(Atoms())
    model = shell(model)
    with mode(model, training=False):
        try:
            used = follow(found.atoms, model, args, kwargs)
            found.parts.append(Part("", args, kwargs))
        except Untraceable as error:
            found.notes.append(f"the whole model cannot be traced: {error}; its children are traced one by one")
            _children(found, model, args, kwargs)
            return found
    first = first_names(model)
    unused = {first[id(p)] for p in model.parameters()} - used
    if unused:
        with mode(model, training=True):
            try:
                unused -= follow(found.atoms, model, args, kwargs)
                found.parts.append(Part("", args, kwargs, training=True))
            except Untraceable as error:
                found.notes.append(f"training mode cannot be traced: {error}")
    if unused:
        found.notes.append(f"{len(unused)} parameters are never used, {sorted(unused)[0]} among them")
    return found


Call = tuple[tuple[Any, ...], Mapping[str, Any]]


def _children(found: Trace, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Trace the largest children that can be, on the inputs they get in one plain forward pass.

    What such a child returns is visible to code that was not traced, and is left alone; so is what no child holds.
    """
    calls, macs = _record(model, args, kwargs)
    stack = [(name, child) for name, child in reversed(list(model.named_children()))]
    stuck: list[str] = [""]
    while stack:
        name, child = stack.pop()
        if name in calls and next(child.parameters(), None) is not None and any(True for _ in child.children()):
            try:
                for call in calls[name]:
                    follow(found.atoms, child, *call, prefix=f"{name}.")
                    found.parts.append(Part(name, *call))
                continue
            except Untraceable as error:
                stuck.append(name)
                found.notes.append(f"{name} ({type(child).__name__}) cannot be traced: {error}")
        stack += [(f"{name}.{n}", c) for n, c in reversed(list(child.named_children()))]
    calls[""] = [(args, kwargs)]
    for name in [n for n in stuck if not any(_below(p, n) for p in [*(p.name for p in found.parts), *stuck] if p != n)]:
        label = name or "the model"
        try:
            for call in calls[name]:
                walk_dependency(found.atoms, model.get_submodule(name), *call, prefix=f"{name}." if name else "")
                found.parts.append(Part(name, *call))
            found.notes.append(f"{label} was traced by torch-pruning, which sees only the path that the inputs take")
        except Untraceable as error:
            found.notes.append(f"{label} is left uncut, torch-pruning cannot trace it either: {error}")
    _freeze_shared(found, model)
    found.atoms.terms.append(Term(max(0, macs - sum(t.macs for t in found.atoms.terms)), ()))


def _below(name: str, other: str) -> bool:
    return not other or name.startswith(f"{other}.")


def _record(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, list[Call]], int]:
    """The calls of every submodule in one forward pass, and the pass's multiply-adds."""
    calls: dict[str, list[Call]] = {}
    entered: list[str] = []

    def enter(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            entered.append(name)
            calls.setdefault(name, []).append((inputs, named))

        return hook

    def leave(*_: Any) -> None:
        entered.pop()

    hooks = [m.register_forward_pre_hook(enter(n), with_kwargs=True) for n, m in model.named_modules()]
    hooks += [m.register_forward_hook(leave) for m in model.modules()]
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(*args, **kwargs)
    except Exception as error:
        where = entered[-1] if entered and entered[-1] else "the model"
        raise TraceError(
            f"example_inputs: the model does not run on {_describe((args, kwargs))}: it stops in {where} with "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}. Pass what the model is called with: "
            "a tensor, a tuple of arguments or a dict of named ones, with a leading batch dimension."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return calls, counter.get_total_flops() // 2


def _describe(inputs: Any) -> str:
    """Shapes instead of tensors."""
    args, kwargs = pytree.tree_map(lambda t: f"{t.dtype}{list(t.shape)}" if isinstance(t, torch.Tensor) else t, inputs)
    return ", ".join([*map(str, args), *[f"{k}={v}" for k, v in kwargs.items()]]) or "no arguments"


def _freeze_shared(found: Trace, model: nn.Module) -> None:
    """A tensor that two parts share, under whatever names, is left as it is."""
    names: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), []).append(name)
    for aliases in names.values():
        owners = {next((p.name for p in found.parts if _below(a, p.name)), "") for a in aliases}
        if len(owners) > 1:
            for (path, _), labels in list(found.atoms.places.items()):
                if path in aliases:
                    found.atoms.freeze(labels, "is shared between modules that are traced apart")
