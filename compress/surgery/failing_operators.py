"""Find the first operator of a module's own code that is not exact in the sliced network.

If the code of the whole model is at fault (`x.view(-1, 16 * 5 * 5)`), its groups are not tried one after the other,
since each trial is a forward pass. Instead, the operators that its own code calls, outside of other modules, are
recorded in the masked reference and in the sliced network. The first whose result differs, or that fails, is at fault,
and with it the groups of its tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compress.graph import OwnOperator, TracedTensor
from compress.modules import modules_of, tensors_in

from .compare_outputs import describe_difference

# Operators that only change type or memory: a run in double precision has others of these than the trace.
IGNORED = frozenset({"_to_copy", "to", "alias", "detach", "clone", "lift_fresh", "contiguous", "as_strided"})


class OperatorResult(NamedTuple):
    """An operator that a module's own code called, its arguments that are tensors, and the tensors that it returned."""

    op: str
    inputs: list[Tensor]
    outputs: list[Tensor]  # empty if it failed


class OperatorAtFault(NamedTuple):
    """The traced tensors of the first operator that differs, or where the code took another path; none if unknown."""

    tensors: list[TracedTensor]
    is_certain: bool


class OwnOperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the operators that are called while no submodule is active and recording is not paused."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[OperatorResult] = []
        self.depth = 0  # of active submodules
        self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        is_own = self.depth == 0 and not self.is_paused and name not in IGNORED
        record = OperatorResult(name if name.startswith("__") else name.rstrip("_"), tensors_in(args), [])
        number = len(self.results)
        if is_own:
            self.results.append(record)
        result = func(*args, **(kwargs or {}))
        record.outputs.extend(tensors_in(result))
        if is_own and not record.outputs:
            del self.results[number]
        return result

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing for the time of the context."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @contextlib.contextmanager
    def recording(self, module: nn.Module) -> Iterator[None]:
        """Record the operators of a module's own code for the time of the context."""

        def enter(*_: Any) -> None:
            self.depth += 1

        def leave(*_: Any) -> None:
            self.depth -= 1

        submodules = [m for m in modules_of(module).values() if m is not module]
        hooks = [m.register_forward_pre_hook(enter, prepend=True) for m in submodules]
        hooks += [m.register_forward_hook(leave, always_call=True) for m in submodules]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()


def find_operator_at_fault(
    expected: list[OperatorResult],
    actual: list[OperatorResult],
    traced: list[OwnOperator],
    kept_part: Callable[[Tensor, TracedTensor], Tensor],
    is_comparable: Callable[[TracedTensor], bool],
) -> OperatorAtFault:
    """Return the first operator that differs, fails, or is not the one that the masked reference calls there.

    Args:
        expected: the operators of the masked reference.
        actual: those of the sliced network, up to the one that failed.
        traced: those of the trace.
        kept_part: selects the positions of a tensor that remain.
        is_comparable: tells whether these positions have the same values in both networks.
    """
    traced = [operator for operator in traced if operator.op not in IGNORED]
    for number, (reference, operator) in enumerate(zip(expected, traced, strict=False)):
        pairs = list(zip(reference.outputs, operator.outputs, strict=False))
        if reference.op != operator.op or any(t.ndim != len(description.shape) for t, description in pairs):
            break  # the trace does not match this run
        if number == len(actual):  # the code failed after the last operator, and none is at fault
            return OperatorAtFault(traced[number - 1].outputs if number else [], is_certain=False)
        result = actual[number]
        if result.op != reference.op:  # the code takes another path, by the shape of what it computes with there
            known = {id(t): d for r, o in zip(actual[:number], traced, strict=False) for t, d in _pairs(r, o)}
            used = [known[id(tensor)] for tensor in result.inputs if id(tensor) in known]
            return OperatorAtFault(used or operator.tensors, is_certain=False)
        if not result.outputs:
            return OperatorAtFault(operator.tensors, is_certain=True)
        if not all(is_comparable(description) for description in operator.outputs):
            continue
        if describe_difference([kept_part(t, description) for t, description in pairs], result.outputs) is not None:
            return OperatorAtFault(operator.tensors, is_certain=True)
    return OperatorAtFault([], is_certain=False)


def _pairs(result: OperatorResult, operator: OwnOperator) -> Iterator[tuple[Tensor, TracedTensor]]:
    return zip(result.outputs, operator.outputs, strict=False)
