"""The groups of activations: which positions of a module's inputs and outputs a plan keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .atoms import AtomIds, TracedTensor

IntArray = NDArray[np.int64]
KeptPositions = dict[int, IntArray]  # dimension of a tensor -> the positions that remain


class ModuleCall(NamedTuple):
    """The tensors among the arguments and the results of one call of a module, as they were traced."""

    inputs: list[TracedTensor]
    outputs: list[TracedTensor]


class OwnOperator(NamedTuple):
    """An operator that a module's own code calls, outside of other modules."""

    op: str
    tensors: list[TracedTensor]  # inputs and outputs
    outputs: list[TracedTensor]


@dataclass
class CallTrace:
    """Calls of modules in the order of the run, and the atoms that the operators of each module's own code touch."""

    calls: dict[str, list[ModuleCall]] = field(default_factory=lambda: defaultdict(list))
    atoms_of_module: dict[str, dict[int, AtomIds]] = field(default_factory=lambda: defaultdict(dict))  # by id
    root_operators: list[OwnOperator] = field(default_factory=list)  # of the outermost module's own code

    def add_operator(self, module_stack: Sequence[str], operator: OwnOperator) -> None:
        """Record an operator of the last of the active modules, and the atoms of its inputs and outputs.

        The first item of the stack is the caller of the outermost module.
        """
        if len(module_stack) == 2:
            self.root_operators.append(operator)
        known = self.atoms_of_module[module_stack[-1]]
        for tensor in operator.tensors:
            for atom_ids in tensor.atom_ids:
                if atom_ids is not None:
                    known[id(atom_ids)] = atom_ids


@dataclass(frozen=True)
class Activations:
    """The groups to which the positions of traced activations belong."""

    roots: AtomIds  # atom -> its class
    group_of_class: IntArray  # class -> index into `names`, or -1
    dimension_of_class: IntArray  # class -> dimension within its group
    names: Sequence[str]

    def groups_in(self, module: str, trace: CallTrace) -> list[str]:
        """Return the names of the groups that the operators of a module's own code touch."""
        return self._names([atom_ids.ravel() for atom_ids in trace.atoms_of_module.get(module, {}).values()])

    def groups_of(self, tensor: TracedTensor) -> list[str]:
        """Return the names of the groups along the dimensions of an activation."""
        arrays = [atom_ids.ravel() for atom_ids in tensor.atom_ids if atom_ids is not None]
        return self._names(arrays)

    def kept_positions(self, tensor: TracedTensor, keep: Mapping[str, IntArray]) -> KeptPositions:
        """Return the positions of an activation that remain, by dimension; dimensions that stay whole are left out."""
        kept: KeptPositions = {}
        for dim, atom_ids in enumerate(tensor.atom_ids):
            if atom_ids is None:
                continue
            classes = self.roots[atom_ids]
            group, dimension = self.group_of_class[classes], self.dimension_of_class[classes]
            is_kept = np.ones(len(classes), dtype=bool)
            for number in np.unique(group).tolist():
                if number >= 0 and self.names[number] in keep:
                    members = group == number
                    is_kept[members] = np.isin(dimension[members], keep[self.names[number]])
            if not is_kept.all():
                kept[dim] = np.flatnonzero(is_kept)
        return kept

    def _names(self, arrays: Sequence[AtomIds]) -> list[str]:
        if not arrays:
            return []
        groups = np.unique(self.group_of_class[self.roots[np.concatenate(arrays)]])
        return [self.names[number] for number in groups.tolist() if number >= 0]
