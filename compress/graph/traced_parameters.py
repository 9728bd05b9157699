"""Names and atoms of a model's parameters and buffers."""

from __future__ import annotations

from torch import Tensor, nn

from compress.modules import tensors_of

from .atoms import AtomIds, Atoms, TracedTensor


class TensorNames:
    """Names of a model's parameters and buffers as they are now; a tied tensor has the first of its names.

    Tensors are known by their `id`. They are kept alive, because a run may replace a buffer, and the `id` of a tensor
    that is freed is soon that of another.
    """

    def __init__(self, model: nn.Module, prefix: str = "", among: TensorNames | None = None) -> None:
        """Read the names.

        Args:
            model: The model.
            prefix: What the names start with.
            among: Leave out the tensors that these names do not know, such as buffers that a run has replaced.
        """
        tensors = {name: t for name, t in tensors_of(model).items() if among is None or t in among}
        self._tensors = list(tensors.values())
        self._names = {id(tensor): prefix + name for name, tensor in tensors.items()}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._names

    def __getitem__(self, tensor: Tensor) -> str:
        return self._names[id(tensor)]

    def get(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor; None if it is no parameter or buffer."""
        return self._names.get(id(tensor))


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
