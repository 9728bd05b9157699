"""Axes: all arrays of atoms along which sizes are counted, by number."""

from __future__ import annotations

import numpy as np

from .atoms import AtomIds, Atoms


class Axes:
    """The dimensions of the model's tensors, which have a key, followed by those of activations, which have none."""

    def __init__(self, atoms: Atoms) -> None:
        self.keys: list[tuple[str, int] | None] = list(atoms.axes)  # (tensor, dim)
        self.atom_ids: list[AtomIds] = list(atoms.axes.values())
        self.number_of_key = {key: number for number, key in enumerate(atoms.axes)}
        self._number_of_array = {id(atom_ids): number for number, atom_ids in enumerate(self.atom_ids)}

    def number(self, atom_ids: AtomIds) -> int:
        """Return the number of the axis with this array of atoms; add the axis if it is new."""
        if id(atom_ids) not in self._number_of_array:
            self._number_of_array[id(atom_ids)] = len(self.atom_ids)
            self.keys.append(None)
            self.atom_ids.append(atom_ids)
        return self._number_of_array[id(atom_ids)]

    @property
    def sizes(self) -> list[int]:
        """Return the dense size of each axis."""
        return [atom_ids.size for atom_ids in self.atom_ids]

    @property
    def all_atoms(self) -> AtomIds:
        """Return the atoms of all axes, concatenated."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self.atom_ids])
