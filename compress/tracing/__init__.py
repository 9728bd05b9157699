"""How groups are found: what the model's operators do to the dimensions of its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .. import forms as _forms  # noqa: F401  (they register themselves)
from .. import norms as _norms  # noqa: F401
from ..attention import form_of, make_compact_, when
from ..shell import shell
from ..walk import modules_of, tensors_of
from .atoms import Atoms, Term
from .dependency import walk_dependency
from .follow import Untraceable, follow
from .record import TraceError as TraceError
from .record import record


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
    shell: nn.Module  # what was run in the model's place
    parts: list[Part] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@contextlib.contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Run in eval mode, or in training mode with layers (norms, dropout) in eval, and put every flag back.

    Flags are set one by one: some libraries' `train()` does more than set them.
    """
    before = [(module, module.training) for module in modules_of(model).values()]
    try:
        for module, flag in before:
            wanted = training and any(child is not None for child in module._modules.values())
            if flag != wanted:
                module.training = wanted
        yield
    finally:
        for module, flag in before:
            if module.training != flag:
                module.training = flag


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    one_path: bool = False,
    wanted: Collection[str] | None = None,
    *,
    heads: bool = False,
    apart: bool = False,
) -> Trace:
    """Follow the model in eval mode; also in training mode where that uses parameters which eval mode does not.

    Where its children are traced one by one, only those that are or hold a `wanted` module, or lie in one. With `heads`
    attention falls into whole heads, else into dimensions that are alike in all heads; with `apart` queries and keys
    need not be cut like values.

    Raises:
        TraceError: the model does not run on these inputs.
    """
    model = make_compact_(shell(model), apart)
    modules = modules_of(model)
    found_forms = {name: form for name, module in modules.items() if (form := form_of(module)) is not None}
    forms = frozenset(name for name, form in found_forms.items() if type(modules[name]) is form)
    later = frozenset(name for name, form in found_forms.items() if when(form) == "cut")
    numbers = {name: {v for v in vars(m).values() if type(v) is int} for name, m in modules.items()}
    found = Trace(Atoms(heads=heads, apart=apart, forms=forms, later=later, numbers=numbers), model)
    with mode(model, training=False):
        try:
            used = follow(found.atoms, model, args, kwargs)
            found.parts.append(Part("", args, kwargs))
        except Untraceable as error:
            found.notes.append(f"the whole model cannot be traced: {error}; its children are traced one by one")
            _children(found, model, args, kwargs, one_path, wanted)
            return found
    unused = {name for name, tensor in tensors_of(model).items() if isinstance(tensor, nn.Parameter)} - used
    if unused:
        with mode(model, training=True):
            try:
                counted = len(found.atoms.terms)
                unused -= follow(found.atoms, model, args, kwargs)
                del found.atoms.terms[counted:]  # costs are those of inference
                found.parts.append(Part("", args, kwargs, training=True))
            except Untraceable as error:
                found.notes.append(f"training mode cannot be traced: {error}")
    if unused:
        text = f"{len(unused)} parameters are never used, {sorted(unused)[0]} among them"
        found.notes.append(f"{text}: code that uses them on other inputs would meet the new widths, and may not run")
    return found


def _children(
    found: Trace,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    one_path: bool,
    wanted: Collection[str] | None,
) -> None:
    """Trace the largest children that can be, on the inputs they get in one plain forward pass.

    What such a child returns is visible to code that was not traced, and is left alone; so is what no child holds, and
    a child whose parts are also used from outside it.
    """
    seen = record(model, args, kwargs)
    seen.calls[""] = [(args, kwargs)]
    stack = [(name, child) for name, child in reversed(list(model.named_children()))]
    stuck: list[str] = [""]
    while stack:
        name, child = stack.pop()
        if wanted is not None and not any(name == w or _below(name, w) or _below(w, name) for w in wanted):
            continue
        whole = name in seen.calls and seen.closed(name) and next(child.parameters(), None) is not None
        if whole and any(True for _ in child.children()):
            try:
                for call in seen.calls[name]:
                    follow(found.atoms, child, *call, prefix=f"{name}.")
                    found.parts.append(Part(name, *call))
                continue
            except Untraceable as error:
                stuck.append(name)
                found.notes.append(f"{name} ({type(child).__name__}) cannot be traced: {error}")
        stack += [(f"{name}.{n}", c) for n, c in reversed(list(child.named_children()))]
    for name in [n for n in stuck if not any(_below(p, n) for p in [*(p.name for p in found.parts), *stuck] if p != n)]:
        label = name or "the model"
        if not one_path:
            found.notes.append(f"{label} is left uncut; target.one_path would trust the path that the inputs take")
            continue
        try:
            for call in seen.calls[name]:
                walk_dependency(found.atoms, model.get_submodule(name), *call, prefix=f"{name}." if name else "")
                found.parts.append(Part(name, *call))
            found.notes.append(f"{label} was traced by torch-pruning, which sees only the path that the inputs take")
        except Untraceable as error:
            found.notes.append(f"{label} is left uncut, torch-pruning cannot trace it either: {error}")
    _freeze_shared(found, model)
    found.atoms.terms.append(Term(max(0, seen.macs - sum(t.macs for t in found.atoms.terms)), ()))


def _below(name: str, other: str) -> bool:
    return not other or name.startswith(f"{other}.")


def _freeze_shared(found: Trace, model: nn.Module) -> None:
    """A tensor that two parts share, under whatever names, is left as it is."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors_of(model, aliases=True).items():
        names.setdefault(id(tensor), []).append(name)
    for aliases in names.values():
        owners = {next((p.name for p in found.parts if _below(a, p.name)), "") for a in aliases}
        if len(owners) > 1:
            for (path, _), labels in list(found.atoms.places.items()):
                if path in aliases:
                    found.atoms.freeze(labels, "is shared between modules that are traced apart")
