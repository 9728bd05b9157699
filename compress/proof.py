"""A group is offered only after it was proved: on the example inputs, zeroed and sliced networks agree."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .branches import along_with, removal, unread
from .groups import Branch, Group, Groups
from .plan import Plan
from .shell import shell
from .silence import columns_left, loudness, silenced
from .slicing import scale_, slice_
from .tracing import Part, mode
from .tracing.tensors import tensors_in
from .walk import modules_of

UNSEEN = "the model returns nothing on the example inputs: that the cut runs was proved, not that it computes the same"
COARSE = "the model returns integers alone, which do not show small differences: let it return what they are made from"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


class _Stuck(Exception):
    """The model does not run; `module` is where it stopped."""

    def __init__(self, why: str, module: str) -> None:
        super().__init__(why)
        self.module = module


class _Blind(str):
    """Nothing can be compared, whatever is cut."""


def prove(model: nn.Module, groups: Groups, more: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None) -> None:
    """Refuse every group that cannot be cut exactly. One pair of runs if all can; bisection finds those that cannot.

    Where the model's code holds a width in an attribute of its own, the attribute is set along with the cut. `more` are
    inputs of the model to prove on in place of those it was traced on, if it runs on them.
    """
    able, traced = [g for g in groups.offered if g.width > 1], groups.parts
    if more is not None:
        groups.parts = [p if p.name else replace(p, args=more[0], kwargs=more[1]) for p in traced]
    if not able or (problem := _difference(model, groups, able, doubted=bool(groups.hints))) is None:
        return
    if isinstance(problem, _Blind):
        groups.refuse(able, problem)
        return
    if more is not None and not _runs(model, groups.parts):
        groups.parts = traced
        if _difference(model, groups, able) is None:
            return
    known, tried = groups.attributes, groups.attributes + groups.hints
    groups.attributes = tried
    failed = _failing(model, groups, able)
    if failed and groups.hints:  # what fails with attributes changed may be right without
        groups.attributes = known
        without = _failing(model, groups, able)
        if len(without) < len(failed):
            failed = without
        else:
            groups.attributes = tried
    for name, why in failed.items():
        groups.refuse([g for g in groups.offered if g.name == name], why)


def prove_branches(model: nn.Module, groups: Groups) -> None:
    """Find the groups that may go altogether, with the residual branch that they are in."""
    for group in groups:
        modules = removal(model, group, groups.pairs)
        if modules is None:
            continue
        others = unread(model, groups, modules)
        others.pop(group.name, None)
        for rest in others.values():
            modules |= rest
        groups.branches[group.name] = Branch(modules, tuple(others))
    some = [groups[name] for name in groups.branches]
    failed = _failing(model, groups, some, nothing=True)
    groups.branches = {name: branch for name, branch in groups.branches.items() if name not in failed}
    along = [along_with(model, groups, name) for name in groups.cost.names]
    groups.cost = replace(groups.cost, along=np.array(along, dtype=np.int64))


def _failing(model: nn.Module, groups: Groups, some: Sequence[Group], nothing: bool = False) -> dict[str, str]:
    """The groups among `some` that cannot be cut, or of which not even `nothing` can be kept, and why."""
    problem = _difference(model, groups, some, nothing=nothing) if some else None
    if problem is None:
        return {}
    if len(some) == 1:
        return {some[0].name: f"{problem}{_advice(model, some[0], problem)}"}
    half = len(some) // 2
    first, second = list(some[:half]), list(some[half:])
    if isinstance(problem, _Stuck) and problem.module:  # those that lie where it stopped are the first to suspect
        inside = [g for g in some if any(s.tensor.startswith(f"{problem.module}.") for s in g.slots)]
        if inside and len(inside) < len(some):
            first, second = inside, [g for g in some if g not in inside]
    found = _failing(model, groups, first, nothing) | _failing(model, groups, second, nothing)
    return found or {g.name: f"only together with others: {problem}" for g in some}


def _advice(model: nn.Module, group: Group, problem: str | _Stuck) -> str:
    """What a user can do about attention that knows one width only."""
    if not group.product or not isinstance(problem, _Stuck) or not problem.module:
        return ""
    kind = type(model.get_submodule(problem.module)).__name__
    return f". A compact form of {kind} would do: see compress/attention.py"


def _difference(
    model: nn.Module, groups: Groups, some: Sequence[Group], nothing: bool = False, doubted: bool = False
) -> str | _Stuck | None:
    """Why zeroing and slicing most of each group do not agree, or None if they do.

    With `nothing` all of each group goes, and its branch is taken out. Where it is `doubted` that the sliced model runs
    at all, that is tried first.
    """
    random = np.random.default_rng(0)
    keep = {g.name: g.per_way(_few(g.width // g.ways), random) for g in some}
    names = {g.name for g in some}
    if nothing:
        keep = {name: np.zeros(0, dtype=np.int64) for name in names}
        names |= {other for name in names for other in groups.branches[name].unread}
    going = {name: branch for name, branch in groups.branches.items() if name in keep}
    chosen = replace(groups, offered=[g for g in groups.offered if g.name in names], branches=going)
    chosen.cost = groups.cost.without({g.name for g in groups.offered} - names)
    plan = Plan.build(model, chosen, keep)
    why: str | _Stuck | None = None
    # Rounding can look like a difference in single precision, not in double. A wrong scale of attention may be hard to
    # see in single precision, where queries and keys are small, as in a fresh network.
    product = any(g.product for g in some)
    if doubted and product and isinstance(stuck := _sliced(shell(model), groups, plan, None), _Stuck):
        return stuck
    for dtype in (torch.float64, None) if product else (None, torch.float64):
        copy = shell(model)
        _replace_(copy, _lively())
        why = _compare(copy, groups, plan, dtype)
        if not isinstance(why, _Stuck if product else str):  # not every code runs in double precision
            break
    return why


@torch.no_grad()
def _compare(model: nn.Module, groups: Groups, plan: Plan, dtype: torch.dtype | None) -> str | _Stuck | None:
    """Run a shell sliced, which costs little and may fail, then with what the plan drops silenced."""
    got = _sliced(shell(model), groups, plan, dtype)
    if isinstance(got, _Stuck):
        return got
    _cast_(model, dtype)
    with silenced(model, groups, plan):
        try:
            expected = [_run(model, part, dtype) for part in _parts(groups, plan)]
        except Exception as error:
            return _Stuck(f"the model does not run in silence: {type(error).__name__}: {str(error)[:160]}", "")
    numbers = [t for one in expected for t in one if t.numel()]
    floats = [t for t in numbers if t.is_floating_point() or t.is_complex()]
    if floats and not any(bool(t.isfinite().any()) for t in floats):
        return _Blind("no output on the example inputs is finite, so that nothing can be proved: look for NaN in them")
    if not floats and (note := COARSE if numbers else UNSEEN) not in groups.notes:
        groups.notes.append(note)
    for one, other in zip(expected, got, strict=True):
        if len(one) != len(other):
            return f"zeroed and sliced outputs differ: {len(one)} tensors became {len(other)}"
        for a, b in zip(one, other, strict=True):
            if a.shape != b.shape:
                return f"zeroed and sliced outputs differ in shape: {list(a.shape)} became {list(b.shape)}"
            if (off := _distance(a, b)) > TOLERANCE.get(a.dtype.to_real(), 3e-2):
                return f"zeroed and sliced outputs differ by {off:.1e} of their range"
    return None


@torch.no_grad()
def _sliced(model: nn.Module, groups: Groups, plan: Plan, dtype: torch.dtype | None) -> list[list[Tensor]] | _Stuck:
    """Cut a shell and run it; what layers still hear is made as loud as where the rest is silenced."""
    deaf = columns_left(model, groups, plan)
    modules = modules_of(_cast_(slice_(model, replace(plan, scales=[])), dtype))  # what is left takes little room
    scale_(model, plan)
    for path, kept in deaf.items():
        if path in modules and (weight := modules[path]._parameters.get("weight")) is not None:
            weight.mul_(loudness(plan.shapes[f"{path}.weight"][1], kept))
    try:
        return [_run(model, part, dtype) for part in _parts(groups, plan)]
    except Exception as error:  # the model's own code, at a width it was not written for
        where = _where(error, model)
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return _Stuck(f"the code of {where or 'the model'} does not run at another width: {text}", where)


def _parts(groups: Groups, plan: Plan) -> list[Part]:
    """What was traced and is cut."""
    return [p for p in groups.parts if not p.name or any(t.startswith(f"{p.name}.") for t in plan.slices)]


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference as a part of the largest number; NaN has to meet NaN."""
    if not a.numel():
        return 0.0
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return float((a != b).any())
    if not a.isnan().equal(b.isnan()):
        return math.inf
    scale = a.nan_to_num().abs().max() + 1e-30
    return float(((a - b).nan_to_num().abs() / scale).max())


def _runs(model: nn.Module, parts: Sequence[Part]) -> bool:
    """Whether the model as it is runs on the inputs of these parts."""
    model = shell(model)
    try:
        return bool([_run(model, part, None) for part in parts])
    except Exception:  # of the model's own code
        return False


def _few(width: int) -> int:
    """How many dimensions are left for the proof: one may hide behind broadcasting, many cost time."""
    return max(width // 8, min(width // 4, 4), 1)


def _replace_(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Put what `change` makes of a shell's tensors in their place; the model it was made of keeps its own."""
    new: dict[int, Tensor] = {}
    for module in modules_of(model).values():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for key, tensor in table.items():
                if tensor is None or not tensor.is_floating_point():
                    continue
                if id(tensor) not in new:
                    value = change(tensor)
                    trained = isinstance(tensor, nn.Parameter) and value is not tensor
                    new[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if trained else value
                table[key] = new[id(tensor)]


def _cast_(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    if dtype is not None:
        _replace_(model, lambda value: value.detach().to(dtype))
    return model


def _lively() -> Callable[[Tensor], Tensor]:
    """Random values for constant vectors (fresh norms, layer scales): a factor of zero or one would hide an error."""
    generator = torch.Generator().manual_seed(0)

    def change(value: Tensor) -> Tensor:
        if not 1 < value.numel() <= 2**17:
            return value
        flat = value.detach().flatten()
        if bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all()):
            return (0.5 + torch.rand(value.shape, generator=generator)).to(value)
        return value

    return change


def _where(error: Exception, model: nn.Module) -> str:
    """The innermost module whose code was at work."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [names[id(module)] for module in frames if id(module) in names]
    return found[-1] if found else ""


def _run(model: nn.Module, part: Part, dtype: torch.dtype | None) -> list[Tensor]:
    def cast(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.to(dtype) if dtype is not None and t.is_floating_point() else t.clone()

    module = model.get_submodule(part.name)
    args, kwargs = pytree.tree_map(cast, (part.args, dict(part.kwargs)))
    with torch.no_grad(), mode(module, part.training), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(0)
        return tensors_in(module(*args, **kwargs))
