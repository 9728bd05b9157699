"""Scaled weights that no backward pass has to keep.

A gate makes W diag(s) of a weight W, and the layer that reads it would keep that for its backward pass beside W: with
few activations, as in a transformer on a small batch, the weights twice are felt. What is kept here instead is how it
was made; the backward pass makes it anew, from the same numbers, to the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..gates import Gate


@dataclass(frozen=True)
class _Made:
    """What a gate made of a weight, or of what another gate made of it."""

    gate: Gate
    weight: Tensor | _Made
    versions: tuple[int, ...]

    @classmethod
    def by(cls, gate: Gate, weight: Tensor | _Made) -> _Made:
        return cls(gate, weight, cls.count(gate, weight))

    @staticmethod
    def count(gate: Gate, weight: Tensor | _Made) -> tuple[int, ...]:
        """How often the numbers it was made from have been changed."""
        return tuple(t._version for t in [*gate.scores, *([weight] if isinstance(weight, Tensor) else [])])

    def again(self) -> Tensor:
        """
        Raises:
            RuntimeError: the weight or its scores have changed since.
        """
        if self.count(self.gate, self.weight) != self.versions:
            raise RuntimeError("backward: weights or scores were changed in place since the forward pass")
        return self.gate.scaled(self.weight.again() if isinstance(self.weight, _Made) else self.weight)


@dataclass(frozen=True)
class _View:
    """A tensor on the memory of what a gate made."""

    made: _Made
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def made_anew(model: nn.Module) -> Iterator[None]:
    """Inside, a forward pass keeps no scaled weight for the backward pass, which makes it anew: the same gradients."""
    living: dict[int, tuple[weakref.ref[Tensor], _Made]] = {}  # by address, which is theirs as long as they live

    def find(tensor: Tensor) -> _Made | None:
        if tensor.layout != torch.strided:
            return None
        here, made = living.get(tensor.untyped_storage().data_ptr(), (None, None))
        return made if here is not None and here() is not None else None

    def note(gate: nn.Module, inputs: Any, scaled: Tensor) -> None:
        assert isinstance(gate, Gate)
        (weight,) = inputs
        made = _Made.by(gate, find(weight) or weight.detach())
        living[scaled.untyped_storage().data_ptr()] = (weakref.ref(scaled), made)

    def pack(tensor: Tensor) -> Any:
        made = find(tensor)
        if made is None:
            return tensor, tensor._version
        return _View(made, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, _View):
            with torch.no_grad():
                return kept.made.again().as_strided(kept.size, kept.stride, kept.offset)
        tensor, version = kept
        if tensor._version != version:  # with hooks autograd does not look
            raise RuntimeError("backward: a tensor that is needed was changed in place since the forward pass")
        return tensor  # type: ignore[no-any-return]

    handles = [gate.register_forward_hook(note) for gate in model.modules() if isinstance(gate, Gate)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for handle in handles:
            handle.remove()
