"""find_groups: trace, assemble, select, prove."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .assemble import KINDS, assemble
from .groups import Group, Groups
from .heads import take_apart
from .proof import prove, prove_branches
from .recipe import Target
from .tracing import TraceError, trace
from .walk import modules_of

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


def find_groups(model: nn.Module, example_inputs: Any, target: Target | None = None) -> Groups:
    """The groups of `model` that can be cut exactly, as `target` asks (default: channels and residual streams).

    `example_inputs` is what the model is called with: a tensor, a tuple of arguments, a dict of named ones, or a list
    that is itself the one argument. Costs are those of a single example, or of the inputs as they are where the first
    dimension is none of examples: sequences that come first. Groups are proved on two examples, if there are two.

    Raises:
        TraceError: the model does not run on the example inputs.
        ValueError: a name in `target` matches nothing.
        TypeError: something else than a model or a target.
    """
    for what, given, kind in (("model", model, nn.Module), ("target", target, Target | None)):
        if not isinstance(given, kind):
            word = "torch.nn.Module" if what == "model" else "compress.recipe.Target"
            got = f"the class {given.__name__}" if isinstance(given, type) else f"{type(given).__name__} {given!r:.60}"
            raise TypeError(f"{what}: expected a {word}; got {got}")
    with torch.inference_mode(False):
        return _find(model, pytree.tree_map(_telling, as_call(example_inputs)), target or Target(residual=True))


def _find(model: nn.Module, call: Inputs, target: Target) -> Groups:
    way: dict[str, Any] = {"heads": "heads" in words(target), "apart": bool({"qk", "v"} & words(target))}

    def traced(some: Inputs) -> Groups:
        return assemble(model, trace(model, *some, target.one_path, _wanted(model, target), **way))

    args, kwargs = one = _first(call)
    several = one is not call and any(len(t) > 1 for t in pytree.tree_leaves(call) if isinstance(t, Tensor))
    two = _first(call, 2) if several else None
    try:
        groups = traced(one)
        if two is not None and _flat(call) and _macs(traced(two)) != 2 * _macs(groups):
            raise TraceError("the first dimension is not one of examples")
    except TraceError:
        (args, kwargs), two = call, None  # it may not run on a single example
        groups = traced(call)
    select(groups, model, target)
    if "per_head" in words(target):
        whole = assemble(
            model, trace(model, args, kwargs, target.one_path, _wanted(model, target), heads=True, apart=way["apart"])
        )
        tensors = [*model.named_parameters(), *model.named_buffers()]
        take_apart(groups, whole, {name: tuple(tensor.shape) for name, tensor in tensors})
    prove(model, groups, two)
    if target.branches:
        prove_branches(model, groups)
    return groups


def as_call(example_inputs: Any) -> Inputs:
    """
    Raises:
        TypeError: `example_inputs` is none of the forms that a model can be called with.
    """
    if isinstance(example_inputs, (Tensor, list)):
        return (example_inputs,), {}
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    raise TypeError(
        "example_inputs: expected a tensor, a tuple of arguments, a dict of named arguments or a list of images; "
        f"got {type(example_inputs).__name__}"
    )


def _telling(value: Any) -> Any:
    """An input that zeroed and sliced networks can be told apart by: constant images, as of torch.zeros, become random.

    Raises:
        TraceError: there is no example in it.
    """
    if not isinstance(value, Tensor):
        return value
    if value.ndim > 1 and not len(value):
        raise TraceError(f"example_inputs: expected at least one example; got shape {list(value.shape)}")
    if value.ndim > 2 and value.is_floating_point() and bool((value == value.flatten()[0]).all()):
        return torch.rand(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
    return value.clone() if value.is_inference() else value


def _flat(call: Inputs) -> bool:
    """Whether inputs are rows of numbers, of which sequences may come first, and not images."""
    return all(t.ndim < 4 for t in pytree.tree_leaves(call) if isinstance(t, Tensor))


def _macs(groups: Groups) -> int:
    return int(groups.cost.macs(groups.cost.widths))


def _first(call: Inputs, count: int = 1) -> Inputs:
    """The first examples of a batch, where it is plain which dimension is the batch."""

    def listed(value: Any) -> bool:  # a list of images is a batch of another kind
        if isinstance(value, (tuple, Mapping)):
            return any(map(listed, value.values() if isinstance(value, Mapping) else value))
        return not isinstance(value, Tensor) and any(isinstance(t, Tensor) for t in pytree.tree_leaves(value))

    values = [*call[0], *call[1].values()]
    nested = any(map(listed, values))
    tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
    sizes = {t.shape[0] if t.ndim > 1 else None for t in tensors}
    if nested or len(sizes) != 1 or None in sizes or sizes == {0}:
        return call
    with torch.no_grad():
        first: Inputs = pytree.tree_map(lambda v: v[:count] if isinstance(v, Tensor) else v, call)
        return first


def words(target: Target) -> set[str]:
    """How finely attention is to be cut, where that is said."""
    return set() if isinstance(target.attention, bool) else set(target.attention)


def _wanted(model: nn.Module, target: Target) -> set[str] | None:
    """The modules that `include` names; None if it names none, or groups, which are not known yet."""
    names = [name for name in modules_of(model) if name]
    try:
        return _matching(target.include, names, "target.include") if target.include else None
    except ValueError:
        return None


def select(groups: Groups, model: nn.Module, target: Target) -> None:
    """Leave only the groups that the target asks for.

    Raises:
        ValueError: a name in `include` or `exclude` matches no module and no group.
    """
    names = [name for name in modules_of(model) if name]
    names += [g.name for g in groups if g.name not in names]
    include = _matching(target.include, names, "target.include")
    exclude = _matching(target.exclude, names, "target.exclude")
    on = {kind: getattr(target, kind, False) for kind in KINDS} | {"mlp": target.mlp or target.channels}
    if "heads" in words(target):
        on |= {"heads": True, "attention": False}
    for kind in KINDS:
        if not on[kind]:
            groups.refuse([g for g in groups if g.kind == kind], f"target.{kind} is off")
    if parts := words(target) & {"qk", "v"}:
        for group in [g for g in groups if g.kind == "attention" and g.part == "qkv"]:
            kind = type(model.get_submodule(group.name.partition(":")[0].rpartition(".")[0])).__name__
            groups.refuse(
                [group],
                f"{kind} takes queries, keys and values for one width, so they cannot be scored apart. "
                f"A compact form of {kind} would do: see compress/attention.py",
            )
        for part in {"qk", "v"} - parts:
            groups.refuse(
                [g for g in groups if g.kind == "attention" and g.part == part], f"target.attention has no {part}"
            )
    if target.include:
        groups.refuse([g for g in groups if not _writes(g, include)], "not in target.include")
    groups.refuse([g for g in groups if _writes(g, exclude)], "in target.exclude")
    groups.refuse([g for g in groups if g.width == 1], "has one dimension only")
    if narrow := [g.name for g in groups if g.width <= target.round_to > 1 and g.kind != "heads"]:
        groups.notes.append(
            f"{len(narrow)} groups have no more than target.round_to = {target.round_to} dimensions, {narrow[0]} among "
            "them, and stay whole; lower round_to"
        )


def _writes(group: Group, modules: set[str]) -> bool:
    """Whether a group is written in one of these modules or below one."""
    paths = {group.name} | {slot.tensor.rpartition(".")[0] for slot in group.writers}
    return any(path == m or path.startswith(f"{m}.") for path in paths for m in modules)


def _matching(patterns: Sequence[str], names: Sequence[str], where: str) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        if pattern.startswith("re:"):
            expression = re.compile(pattern[3:])
            hits = {name for name in names if expression.fullmatch(name)}
        else:
            hits = {name for name in names if name == pattern}
        if not hits:
            near = difflib.get_close_matches(pattern.removeprefix("re:"), names, n=3, cutoff=0.3)
            raise ValueError(
                f"{where}: {pattern!r} matches no module of the model"
                + (f"; the nearest names are {', '.join(near)}" if near else "")
                + ". Give a module's full name, or re: and a regular expression for the whole name."
            )
        found |= hits
    return found
