"""Table of rules by ATen operator, and what rules share. An operator without a rule is a barrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..atoms import AtomIds, Atoms, Mark, TracedTensor


@dataclass
class OperatorCall:
    """One operator of the graph: its arguments by name, with a `TracedTensor` per tensor, and the shapes it returns."""

    op: str
    args: dict[str, Any]
    shapes: list[tuple[int, ...]]

    def __getitem__(self, name: str) -> Any:
        return self.args.get(name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the first output."""
        return self.shapes[0]

    @property
    def input(self) -> TracedTensor:
        """Return the first argument that is a tensor."""
        return next(arg for arg in self.args.values() if isinstance(arg, TracedTensor))

    def tensors(self) -> list[TracedTensor]:
        """Return all arguments that are tensors or in lists of tensors."""
        tensors: list[TracedTensor] = []
        for arg in self.args.values():
            items = arg if isinstance(arg, (list, tuple)) else [arg]
            tensors += [item for item in items if isinstance(item, TracedTensor)]
        return tensors


Rule = Callable[[Atoms, OperatorCall], "TracedTensor | list[TracedTensor]"]
RULES: dict[str, Rule] = {}


def rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of these ATen operators."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operators, function))
        return function

    return register


def barrier(atoms: Atoms, call: OperatorCall, reason: str = "") -> list[TracedTensor]:
    """Freeze all dimensions of all inputs and return outputs of fixed size."""
    tensors = call.tensors()
    for tensor in tensors:
        for atom_ids in tensor.atom_ids:
            atoms.freeze(
                atom_ids, reason or f"passes through `{call.op}`, which is not known to act channel by channel"
            )
    is_constant = all(tensor.is_constant for tensor in tensors)
    return [TracedTensor.fixed(shape, is_constant) for shape in call.shapes]


def freeze_dims(atoms: Atoms, tensor: TracedTensor, dims: Sequence[int], reason: str) -> None:
    """Freeze some dimensions of a tensor."""
    for d in dims:
        atoms.freeze(tensor.atom_ids[d], reason)


def broadcast(atoms: Atoms, tensors: Sequence[TracedTensor], shape: tuple[int, ...]) -> TracedTensor:
    """Join positions that broadcasting brings together; freeze those that meet a dimension of fixed size."""
    out: list[AtomIds | None] = [None] * len(shape)
    for d in range(1, len(shape) + 1):
        full_size = [t for t in tensors if len(t.shape) >= d and t.shape[-d] == shape[-d] > 1]
        meeting = [
            t.atom_ids[-d]
            for t in full_size
            if -d not in t.expanded_dims or all(-d in other.expanded_dims for other in full_size)
        ]
        known = [atom_ids for atom_ids in meeting if atom_ids is not None]
        for other in known[1:]:
            atoms.join(known[0], other)
        meets_fixed = len(known) < len(meeting)
        if known and meets_fixed:
            atoms.freeze(known[0], "meets a tensor of fixed size")
        out[-d] = known[0] if known and not meets_fixed else None
    for tensor in tensors:
        if tensor.is_parameter and len(tensors) > 1:
            for atom_ids in tensor.atom_ids:
                atoms.mark(atom_ids, Mark.WRITTEN)
    return TracedTensor(shape, out, is_constant=all(tensor.is_constant for tensor in tensors))


def alias(tensor: TracedTensor) -> TracedTensor:
    """Describe the same numbers as another tensor: still a parameter, still with a known mean."""
    return replace(tensor, atom_ids=list(tensor.atom_ids), expanded_dims=frozenset())


def one_or_list(outputs: list[TracedTensor]) -> TracedTensor | list[TracedTensor]:
    """Return a single output as itself."""
    return outputs[0] if len(outputs) == 1 else outputs
