"""Trace a model, or its largest traceable children, into atoms."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from compress.errors import TraceError
from compress.modules import (
    FormUse,
    can_select,
    compact_form_of,
    form_use,
    guarded_parameters,
    is_selective,
    module_mode,
    modules_of,
    scripted_modules,
    shared_copy,
    tensors_of,
    use_compact_forms_,
)

from .atoms import Atoms, MacTerm
from .call_record import record_calls
from .group import TracedPart
from .operator_trace import Untraceable, trace_operators
from .torch_pruning_fallback import trace_with_torch_pruning
from .traced_parameters import TensorNames


@dataclass
class Trace:
    """Result of tracing a model."""

    atoms: Atoms
    parts: list[TracedPart] = field(default_factory=list)
    untraced_model: TracedPart | None = None  # the whole model, if only children of it are traced
    num_passes: int = 0  # forward passes of the whole model
    notes: list[str] = field(default_factory=list)


def trace_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    one_path: bool = False,
    included: Collection[str] | None = None,
    *,
    whole_heads: bool = False,
    separate_qkv: bool = False,
    selection: bool = False,
    eval_only: bool = False,
) -> Trace:
    """Trace a model in eval mode, and in training mode too if that uses parameters which eval mode does not.

    Args:
        model: The model; it is not changed.
        args: Positional arguments of the forward pass.
        kwargs: Keyword arguments of the forward pass.
        one_path: Trace modules whose code branches on values with torch-pruning, which sees one path only.
        included: If children are traced one by one, only these modules and their parents and children.
        whole_heads: Cut attention by whole heads, not by the same dimensions of all heads.
        separate_qkv: Cut queries and keys independently of values.
        selection: Let norms select channels of residual streams, which stay whole.
        eval_only: Do not trace training mode.

    Raises:
        TraceError: The model does not run on these inputs, or is a scripted module.
        NotReady: `one_path` needs torch-pruning, which is not installed.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError(
            f"model: expected a torch.nn.Module that runs Python code; got a scripted one ({type(model).__name__}), "
            "whose code is fixed. Prune the model first, then script the result with torch.jit"
        )
    model = use_compact_forms_(shared_copy(model), separate_qkv)
    modules = modules_of(model)
    forms = {name: form for name, module in modules.items() if (form := compact_form_of(module)) is not None}
    atoms = Atoms(
        whole_heads=whole_heads,
        separate_qkv=separate_qkv,
        compact_modules=frozenset(name for name, form in forms.items() if type(modules[name]) is form),
        compact_when_cut=frozenset(name for name, form in forms.items() if form_use(form) is FormUse.WHEN_CUT),
        selectable_norms=frozenset(name for name, module in modules.items() if selection and can_select(module)),
        selective_norms=frozenset(name for name, module in modules.items() if is_selective(module)),
    )
    trace = Trace(atoms)
    if scripted := list(scripted_modules(model)):
        named = f"{scripted[0]} and {len(scripted) - 1} more" if len(scripted) > 1 else scripted[0]
        trace.notes.append(f"scripted modules are not cut, nor the dimensions that they read and write: {named}")
    known = TensorNames(model)
    with module_mode(model, training=False):
        try:
            used, calls, trace.num_passes = trace_operators(atoms, model, args, kwargs, known=known)
            trace.parts.append(TracedPart("", args, kwargs, calls=calls))
        except Untraceable as error:
            trace.num_passes += 2  # this one, and another that records the inputs of children
            trace.notes.append(f"the whole model cannot be traced: {error}; its children are traced one by one")
            trace.untraced_model = TracedPart("", args, kwargs)
            _trace_children(trace, model, args, kwargs, one_path, included, known)
            return trace
    unused = {name for name, tensor in tensors_of(model).items() if isinstance(tensor, nn.Parameter)} - used
    if unused and not eval_only:
        with module_mode(model, training=True):
            try:
                num_eval_terms = len(atoms.mac_terms)
                used, calls, num_runs = trace_operators(atoms, model, args, kwargs, known=known)
                trace.num_passes += num_runs
                unused -= used
                del atoms.mac_terms[num_eval_terms:]  # costs are those of inference
                trace.parts.append(TracedPart("", args, kwargs, training=True, calls=calls))
            except Untraceable as error:
                trace.notes.append(f"training mode cannot be traced: {error}")
    if unused:
        text = f"the example inputs do not use {len(unused)} parameters, for example {sorted(unused)[0]}"
        trace.notes.append(f"{text}: code that uses them on other inputs was not verified and may fail after the cut")
    return trace


def _trace_children(
    trace: Trace,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    one_path: bool,
    included: Collection[str] | None,
    known: TensorNames,
) -> None:
    """Trace the largest traceable children, on the inputs that they get in one forward pass of the model.

    The outputs of such a child are visible to code that was not traced, so they are frozen. What lies in no traced
    child, and a child whose parameters are also used from outside of it, is left alone.
    """
    record = record_calls(model, args, kwargs)
    record.calls[""] = [(args, kwargs)]
    stack = [(name, child) for name, child in reversed(list(model.named_children()))]
    untraced: list[str] = [""]
    while stack:
        name, child = stack.pop()
        if included is not None and not any(name == i or _is_below(name, i) or _is_below(i, name) for i in included):
            continue
        self_contained = (
            name in record.calls and record.is_self_contained(name) and next(child.parameters(), None) is not None
        )
        if self_contained and any(True for _ in child.children()):
            try:
                for call in record.calls[name]:
                    _, calls, _ = trace_operators(trace.atoms, child, *call, prefix=f"{name}.", known=known)
                    trace.parts.append(TracedPart(name, *call, calls=calls))
                continue
            except Untraceable as error:
                untraced.append(name)
                trace.notes.append(f"{name} ({type(child).__name__}) cannot be traced: {error}")
        stack += [(f"{name}.{child_name}", c) for child_name, c in reversed(list(child.named_children()))]
    parts_and_untraced = [*(part.name for part in trace.parts), *untraced]
    innermost = [n for n in untraced if not any(_is_below(other, n) for other in parts_and_untraced if other != n)]
    for name in innermost:
        label = name or "the model"
        if not one_path:
            trace.notes.append(
                f"{label} is not cut; set target.one_path: true to cut it along the path that the example inputs take"
            )
            continue
        try:
            for call in record.calls[name]:
                prefix = f"{name}." if name else ""
                with guarded_parameters(model):
                    trace_with_torch_pruning(trace.atoms, model.get_submodule(name), *call, prefix=prefix)
                trace.parts.append(TracedPart(name, *call))
            trace.notes.append(f"{label} was traced by torch-pruning, which sees only the path that the inputs take")
        except Untraceable as error:
            trace.notes.append(f"{label} is not cut: torch-pruning cannot trace it either: {error}")
    _freeze_shared_tensors(trace, model)
    untraced_macs = max(0, record.macs - sum(term.dense_macs for term in trace.atoms.mac_terms))
    trace.atoms.mac_terms.append(MacTerm(untraced_macs, ()))


def _is_below(name: str, parent: str) -> bool:
    return not parent or name.startswith(f"{parent}.")


def _freeze_shared_tensors(trace: Trace, model: nn.Module) -> None:
    """Freeze tensors that two parts share, under the same or different names."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors_of(model, aliases=True).items():
        names.setdefault(id(tensor), []).append(name)
    for aliases in names.values():
        owners = {next((part.name for part in trace.parts if _is_below(name, part.name)), "") for name in aliases}
        if len(owners) > 1:
            for (name, _), atom_ids in list(trace.atoms.axes.items()):
                if name in aliases:
                    trace.atoms.freeze(atom_ids, "is shared between modules that are traced separately")
