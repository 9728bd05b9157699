"""Find the modules whose own code is not exact at other widths, and the groups at fault, in one forward pass.

The masked reference runs once. When a module returns, the same module of the sliced network runs on the kept positions
of the same inputs, and the kept positions of the outputs are compared. A module that fails although all modules inside
of it are exact is at fault itself: its code reshapes to a fixed width, splits at a fixed position, or mixes channels.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compress.graph import Activations, Group, Groups, Index, ModuleCall, TracedPart, TracedTensor
from compress.modules import module_mode, modules_of, tensors_in

from .compare_outputs import (
    cast_input,
    describe_difference,
    fixed_conditions,
    parts_to_run,
    run_failure,
    run_module,
    sliced_copy,
)
from .failing_operators import OwnOperatorRecorder, find_operator_at_fault
from .masking import masked_reference
from .plan import Plan


@dataclass
class FailingCall:
    """A call of a module that does not run, or computes something else, in the sliced network."""

    module: str
    part: TracedPart
    traced: ModuleCall
    args: tuple[Any, ...]  # at full width
    kwargs: dict[str, Any]
    reason: str
    operator_groups: list[str] = field(default_factory=list)  # of the operator at fault, in a traced part's own code
    is_certain: bool = False  # whether that operator is at fault for certain


class FailureLocation(NamedTuple):
    """The calls at fault, and whether the masked reference runs to its end."""

    calls: list[FailingCall]
    reference_runs: bool


class ModuleComparison:
    """Compare modules of the sliced network with those of the masked reference, one call at a time."""

    def __init__(self, model: nn.Module, groups: Groups, plan: Plan, dtype: torch.dtype | None) -> None:
        assert groups.activations is not None
        self.model, self.groups, self.plan, self.dtype = model, groups, plan, dtype
        self.activations: Activations = groups.activations
        # Activations of these groups cannot be compared. If heads keep different dimensions, no single index selects
        # the kept positions. If queries and keys are rescaled, kept values differ although the cut is exact.
        self.unmapped = {g.name for g in groups if g.num_heads > 1 or any(slot.rescale_power for slot in g.slots)}
        self.keep = {name: np.asarray(kept) for name, kept in plan.keep.items()}
        self.sliced = sliced_copy(model, groups, plan, dtype)

    def problem(
        self, call: FailingCall, expected: Sequence[Tensor], recorder: OwnOperatorRecorder | None = None
    ) -> str | None:
        """Run a module of the sliced network on the kept positions of its inputs; return how its outputs differ.

        A recorder gets the operators of the module's own code.
        """
        leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        traced, outputs = call.traced.inputs, call.traced.outputs
        if len(tensors) != len(traced) or len(expected) != len(outputs):
            return None  # the trace saw other tensors than this run, so they cannot be matched
        if any(len(t.shape) != a.ndim for t, a in zip([*traced, *outputs], [*tensors, *expected], strict=True)):
            return None
        if any(self._is_unmapped(t) for t in (*traced, *outputs)):
            return None
        selected = iter([self._kept_part(a, t) for a, t in zip(tensors, traced, strict=True)])
        args, kwargs = pytree.tree_unflatten(
            [next(selected) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
        )
        module = self.sliced.get_submodule(call.module)
        self.groups.num_passes += not call.module
        try:
            with contextlib.nullcontext() if recorder is None else recorder.recording(module):
                actual = run_module(module, args, kwargs, call.part.training, self.dtype)
        except Exception as error:  # from the model's own code, at a width it was not written for
            return run_failure(error, self.sliced).reason
        return describe_difference([self._kept_part(a, t) for a, t in zip(expected, outputs, strict=True)], actual)

    def locate_operator_(self, call: FailingCall, expected: OwnOperatorRecorder, actual: OwnOperatorRecorder) -> None:
        """Find the first operator that differs in the code of a traced part, and the groups of its tensors."""
        operator = find_operator_at_fault(
            expected.results,
            actual.results,
            call.part.calls.root_operators,
            self._kept_part,
            lambda traced: not self._is_unmapped(traced),
        )
        names = (name for tensor in operator.tensors for name in self.activations.groups_of(tensor))
        call.operator_groups, call.is_certain = list(dict.fromkeys(names)), operator.is_certain

    def _kept_part(self, tensor: Tensor, traced: TracedTensor) -> Tensor:
        for dim, kept in self.activations.kept_positions(traced, self.keep).items():
            tensor = tensor.index_select(dim, torch.as_tensor(kept, device=tensor.device))
        return tensor

    def _is_unmapped(self, traced: TracedTensor) -> bool:
        return bool(self.unmapped) and bool(self.unmapped & set(self.activations.groups_of(traced)))


@torch.no_grad()
def find_failing_calls(
    model: nn.Module,
    groups: Groups,
    plan: Plan,
    dtype: torch.dtype | None,
    parts: Sequence[TracedPart] | None = None,
) -> FailureLocation:
    """Return the calls of modules that are at fault themselves, in the order of the run.

    Args:
        model: a shared copy of the dense model, perturbed.
        groups: its groups.
        plan: a cut that is not exact.
        dtype: the precision to run in; None for that of the model.
        parts: what to run; default: the traced parts that the plan cuts.
    """
    try:
        comparison = ModuleComparison(model, groups, plan, dtype)
    except Exception:  # the model cannot be sliced: a module does not accept the new value of an attribute
        return FailureLocation([], reference_runs=True)
    failing: list[FailingCall] = []
    sliced_modules = modules_of(comparison.sliced)
    with masked_reference(model, groups, plan, dtype):
        for part in parts_to_run(groups, plan) if parts is None else parts:
            if not _run_part_with_comparison(comparison, part, failing, sliced_modules):
                return FailureLocation(failing, reference_runs=False)
    return FailureLocation(failing, reference_runs=True)


def _run_part_with_comparison(
    comparison: ModuleComparison,
    part: TracedPart,
    failing: list[FailingCall],
    sliced_modules: Mapping[str, nn.Module],
) -> bool:
    """Run a part of the masked reference and compare its modules; return whether it runs to its end."""
    root = comparison.model.get_submodule(part.name)
    num_calls: dict[str, int] = {}
    stack: list[tuple[tuple[Any, ...], dict[str, Any], int, int]] = []  # inputs, number of the call, failures before
    hooks = []
    operators, sliced_operators = OwnOperatorRecorder(), OwnOperatorRecorder()
    operators.depth = -1  # the root is not active yet

    def enter(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with operators.paused():
                args, kwargs = pytree.tree_map(lambda t: cast_input(t, None), (args, kwargs))  # it may write to them
            stack.append((args, kwargs, num_calls.get(path, 0), len(failing)))
            operators.depth += 1
            num_calls[path] = num_calls.get(path, 0) + 1

        return hook

    def leave(path: str) -> Any:
        def hook(module: nn.Module, _: Any, result: Any) -> None:
            args, kwargs, number, failures_before = stack.pop()
            operators.depth -= 1
            calls = part.calls.calls.get(path, [])
            if len(failing) > failures_before or number >= len(calls):
                return  # a module inside of it is at fault, or the trace did not see this call
            call = FailingCall(path, part, calls[number], args, kwargs, "")
            is_root = path == part.name
            with operators.paused():
                reason = comparison.problem(call, tensors_in(result), sliced_operators if is_root else None)
                if reason is None:
                    return
                call.reason = reason
                if is_root:
                    comparison.locate_operator_(call, operators, sliced_operators)
                failing.append(call)

        return hook

    for name, module in modules_of(root).items():
        path = f"{part.name}.{name}".strip(".")
        if path in sliced_modules:
            # These hooks run outside those of the masked reference, so they see inputs and outputs at full width.
            hooks.append(module.register_forward_pre_hook(enter(path), with_kwargs=True, prepend=True))
            hooks.append(module.register_forward_hook(leave(path)))
    try:
        with module_mode(root, part.training), fixed_conditions(comparison.dtype):
            args, kwargs = pytree.tree_map(lambda t: cast_input(t, comparison.dtype), (part.args, dict(part.kwargs)))
            comparison.groups.num_passes += not part.name
            with operators:
                root(*args, **kwargs)
    except Exception:  # from the model's own code; all calls that returned before it have been compared
        return False
    finally:
        for hook in hooks:
            hook.remove()
    return True


def groups_at_fault(
    model: nn.Module,
    groups: Groups,
    keep: Mapping[str, Index],
    failing: Sequence[FailingCall],
    dtype: torch.dtype | None,
    run_whole_model: bool = True,
) -> dict[str, str]:
    """Return the groups that cannot be cut, with the reason, by trying the failing calls alone.

    Groups of the same layers in different blocks (`layer_pattern`) are cut together, one pattern after the other; if a
    call fails when a pattern is added, the groups of that pattern in its module are at fault. If the code of the whole
    model is at fault, each trial is a forward pass. Then the groups of its first operator that differs are at fault;
    trials are made only if that is not certain, and if `run_whole_model` allows it.
    """
    is_known = [not call.module and (call.is_certain or not run_whole_model) for call in failing]
    by_operator = [call for call, known in zip(failing, is_known, strict=True) if known]
    failing = [call for call, known in zip(failing, is_known, strict=True) if not known]
    by_name = {group.name: group for group in groups if group.name in keep}
    suspects = [{by_name[name] for name in _suspects(groups, call, by_name)} for call in failing]
    by_pattern: dict[str, list[Group]] = {}
    for group in groups:
        if any(group in members for members in suspects):
            by_pattern.setdefault(layer_pattern(group), []).append(group)
    # Groups that reach over many modules, such as residual streams, are less likely to be at fault: they come first.
    order = sorted(by_pattern.values(), key=lambda members: -len({slot.tensor for g in members for slot in g.slots}))
    at_fault: dict[str, str] = {}
    accepted: list[Group] = []
    for members in order:
        concerned = [number for number, suspected in enumerate(suspects) if suspected & {*members}]
        cut = {group.name: keep[group.name] for group in (*accepted, *members)}
        problems = _try_calls(model, groups, cut, [failing[number] for number in concerned], dtype)
        for number, reason in zip(concerned, problems, strict=True):
            for group in members if reason is not None else ():
                if group in suspects[number]:
                    advice = _compact_form_advice(model.get_submodule(failing[number].module), group)
                    at_fault.setdefault(group.name, f"{reason}{advice}")
        accepted += [group for group in members if group.name not in at_fault]
    for call in by_operator:
        names = [n for n in call.operator_groups if n in by_name] or _suspects(groups, call, by_name)
        at_fault |= dict.fromkeys(names, call.reason)
    for call, suspected in zip(failing, suspects, strict=True):  # if no single pattern fails, all are at fault
        if not any(group.name in at_fault for group in suspected):
            at_fault |= {group.name: call.reason for group in suspected}
    return at_fault


def _compact_form_advice(module: nn.Module, group: Group) -> str:
    """Return advice for attention whose code runs at one width only; empty for other groups and torch's own layers."""
    kind = type(module)
    if not group.gated_on_output or kind.__module__.startswith("torch.nn"):
        return ""
    return f". Write a compact form of {kind.__name__} to cut it: see compress/modules/compact_forms.py"


def _suspects(groups: Groups, call: FailingCall, candidates: Mapping[str, Group]) -> list[str]:
    """Return the candidates that the module's own code touches, or, if none is known, those with tensors inside.

    For the whole model these are all: its code may take a path at other widths that the trace did not see.
    """
    assert groups.activations is not None
    names = [n for n in groups.activations.groups_in(call.module, call.part.calls) if n in candidates]
    if names or call.module == call.part.name:
        return names or list(candidates)
    return [n for n, g in candidates.items() if any(s.tensor.startswith(f"{call.module}.") for s in g.slots)]


def layer_pattern(group: Group) -> str:
    """Return the names of a group's tensors with `#` for numbers: the same layers of all blocks have one pattern."""
    return " ".join(sorted({re.sub(r"\d+", "#", f"{slot.tensor} {slot.dim}") for slot in group.slots}))


def _try_calls(
    model: nn.Module,
    groups: Groups,
    keep: Mapping[str, Index],
    calls: Sequence[FailingCall],
    dtype: torch.dtype | None,
) -> list[str | None]:
    """Cut these groups alone and run these calls alone, on the inputs that they had; return the problem of each."""
    plan = Plan.build(model, groups, keep)
    comparison = ModuleComparison(model, groups, plan, dtype)
    problems: list[str | None] = []
    with masked_reference(model, groups, plan, dtype):
        for call in calls:
            module = model.get_submodule(call.module)
            try:
                expected = run_module(module, call.args, call.kwargs, call.part.training, dtype)
            except Exception:  # from the model's own code: the module does not run without its caller
                problems.append(None)
            else:
                problems.append(comparison.problem(call, expected))
    return problems
