"""Names and atoms of a model's parameters and buffers."""

from __future__ import annotations

from torch import Tensor, nn

from compress.modules import tensors_of

from .atoms import AtomIds, Atoms, TracedTensor


def tensor_names(model: nn.Module) -> dict[int, str]:
    """Return the names of all parameters and buffers by `id`; a tied tensor has the first of its names."""
    return {id(tensor): name for name, tensor in tensors_of(model).items()}


def trace_parameter(atoms: Atoms, name: str, tensor: Tensor, is_kernel: bool) -> TracedTensor:
    """Describe a parameter or buffer by one atom per position of each dimension, the same at every use.

    Args:
        atoms: The table that gets new atoms at the first use.
        name: Name of the tensor in the model.
        tensor: The parameter or buffer.
        is_kernel: Whether a convolution uses it, so that only its first two dimensions can be cut.
    """
    atom_ids: list[AtomIds | None] = []
    for d, size in enumerate(tensor.shape):
        if size == 1 or (is_kernel and d > 1):
            atom_ids.append(None)
        elif (name, d) not in atoms.axes:
            atom_ids.append(atoms.axes.setdefault((name, d), atoms.new(size)))
        else:
            atom_ids.append(atoms.axes[name, d])
    return TracedTensor(tuple(tensor.shape), atom_ids, is_parameter=True, is_constant=True, name=name)
