"""A group is offered only after it was proved: on the example inputs, zeroed and sliced networks agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .gates import attach_
from .groups import Group, Groups
from .plan import Plan
from .shell import shell
from .slicing import slice_
from .tracing import Part, mode
from .tracing.tensors import tensors_in

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


class _Stuck(Exception):
    """The sliced model does not run; `module` is where it stopped."""

    def __init__(self, why: str, module: str) -> None:
        super().__init__(why)
        self.module = module


def prove(model: nn.Module, groups: Groups) -> None:
    """Refuse every group that cannot be cut exactly. One pair of runs if all can; bisection finds those that cannot.

    Where the model's code holds a width in an attribute of its own, the attribute is set along with the cut.
    """
    able = [g for g in groups.offered if g.width > 1]
    if not able or _difference(model, groups, able) is None:
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


def _failing(model: nn.Module, groups: Groups, some: Sequence[Group]) -> dict[str, str]:
    """The groups among `some` that cannot be cut, and why."""
    problem = _difference(model, groups, some) if some else None
    if problem is None:
        return {}
    if len(some) == 1:
        return {some[0].name: str(problem)}
    half = len(some) // 2
    first, second = list(some[:half]), list(some[half:])
    if isinstance(problem, _Stuck) and problem.module:  # those that lie where it stopped are the first to suspect
        inside = [g for g in some if any(s.tensor.startswith(f"{problem.module}.") for s in g.slots)]
        if inside and len(inside) < len(some):
            first, second = inside, [g for g in some if g not in inside]
    found = _failing(model, groups, first) | _failing(model, groups, second)
    return found or {g.name: f"only together with others: {problem}" for g in some}


def _difference(model: nn.Module, groups: Groups, some: Sequence[Group]) -> str | _Stuck | None:
    """Why zeroing and slicing half of each group do not agree, or None if they do."""
    random = np.random.default_rng(0)
    keep = {g.name: np.sort(random.permutation(g.width)[: (g.width + 1) // 2]) for g in some}
    names = {g.name for g in some}
    chosen = replace(groups, offered=[g for g in groups.offered if g.name in names])
    chosen.cost = groups.cost.without({g.name for g in groups.offered} - names)
    plan = Plan.build(model, chosen, keep)
    why: str | _Stuck | None = None
    for dtype in (None, torch.float64):  # rounding can look like a difference in single precision, not in double
        why = None
        for part in groups.parts:
            why = why or _compare(model, part, chosen, keep, plan, dtype)
        if not isinstance(why, str):
            return why
    return why


def _compare(
    model: nn.Module, part: Part, groups: Groups, keep: dict[str, Any], plan: Plan, dtype: torch.dtype | None
) -> str | _Stuck | None:
    zeroed = shell(model, _lively(dtype))
    for name, score in attach_(zeroed, groups).items():
        dropped = np.setdiff1d(np.arange(len(score)), keep[name])
        score.data[torch.as_tensor(dropped, device=score.device)] = 0
    try:
        expected = _run(zeroed, part, dtype)
    except Exception as error:
        return _Stuck(f"the model does not run with gates: {type(error).__name__}: {str(error)[:160]}", "")
    del zeroed
    sliced = shell(model, _lively(dtype))
    entered: list[str] = []

    def leave(*_: Any) -> None:
        entered.pop()

    for name, module in slice_(sliced, plan).named_modules():
        module.register_forward_pre_hook(lambda _, __, name=name: entered.append(name))
        module.register_forward_hook(leave)
    try:
        got = _run(sliced, part, dtype)
    except Exception as error:  # the model's own code, at a width it was not written for
        text = " ".join(str(error).split())[:160]
        where = entered[-1] if entered else part.name
        return _Stuck(
            f"the code of {where or 'the model'} does not run at another width: {type(error).__name__}: {text}", where
        )
    if len(expected) != len(got):
        return f"zeroed and sliced outputs differ: {len(expected)} tensors became {len(got)}"
    for a, b in zip(expected, got, strict=True):
        if a.shape != b.shape:
            return f"zeroed and sliced outputs differ in shape: {list(a.shape)} became {list(b.shape)}"
        if not a.is_floating_point():
            continue
        scale = a.abs().max().nan_to_num() + 1e-30 if a.numel() else 1.0
        off = (
            float(((a - b).abs() / scale).nan_to_num(nan=0.0 if a.isnan().equal(b.isnan()) else 1.0).max())
            if a.numel()
            else 0.0
        )
        if off > TOLERANCE.get(a.dtype, 3e-2):
            return f"zeroed and sliced outputs differ by {off:.1e} of their range"
    return None


def _lively(dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """Random values for constant vectors (fresh norms, layer scales): a factor of zero or one would hide an error."""
    generator = torch.Generator().manual_seed(0)

    def change(value: Tensor) -> Tensor:
        small = value.is_floating_point() and 1 < value.numel() <= 2**17
        if small and bool((value == value.flatten()[0]).all()):
            value = (0.5 + torch.rand(value.shape, generator=generator)).to(value)
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value

    return change


def _run(model: nn.Module, part: Part, dtype: torch.dtype | None) -> list[Tensor]:
    def cast(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.to(dtype) if dtype is not None and t.is_floating_point() else t.clone()

    module = model.get_submodule(part.name)
    args, kwargs = pytree.tree_map(cast, (part.args, dict(part.kwargs)))
    with torch.no_grad(), mode(module, part.training), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tensors_in(module(*args, **kwargs))
