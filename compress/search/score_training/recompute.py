"""Recompute gated weights in the backward pass instead of storing them.

A gate turns a weight W into W diag(s), which the layer would store for its backward pass in addition to W. With small
activations, as in a transformer on a small batch, that nearly doubles the memory. Here autograd stores a reference to
the gate and to W instead, and the backward pass recomputes the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.surgery import Gate


@dataclass(frozen=True)
class _GatedWeight:
    """A gated weight: the gate and its input, which is a weight or the output of another gate."""

    gate: Gate
    weight: Tensor | _GatedWeight
    versions: tuple[int, ...]

    @classmethod
    def of(cls, gate: Gate, weight: Tensor | _GatedWeight) -> _GatedWeight:
        return cls(gate, weight, cls.versions_of(gate, weight))

    @staticmethod
    def versions_of(gate: Gate, weight: Tensor | _GatedWeight) -> tuple[int, ...]:
        """Return autograd's version counters of the scores and the weight, which count in-place changes."""
        return tuple(t._version for t in [*gate.scores, *([weight] if isinstance(weight, Tensor) else [])])

    def recompute(self) -> Tensor:
        """Return the gated weight.

        Raises:
            RuntimeError: the weight or its scores have changed since the forward pass.
        """
        if self.versions_of(self.gate, self.weight) != self.versions:
            raise RuntimeError("backward: weights or scores were changed in place since the forward pass")
        return self.gate.scale(self.weight.recompute() if isinstance(self.weight, _GatedWeight) else self.weight)


@dataclass(frozen=True)
class _GatedWeightView:
    """A tensor that shares the storage of a gated weight."""

    source: _GatedWeight
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def recompute_gated_weights(model: nn.Module) -> Iterator[None]:
    """Let forward passes inside this context store no gated weights; the gradients are the same."""
    # By the address of the storage object, which is unique as long as the tensor lives, also on the meta device.
    gated_weights: dict[int, tuple[weakref.ref[Tensor], _GatedWeight]] = {}

    def find(tensor: Tensor) -> _GatedWeight | None:
        if tensor.layout != torch.strided:
            return None
        reference, gated_weight = gated_weights.get(tensor.untyped_storage()._cdata, (None, None))
        return gated_weight if reference is not None and reference() is not None else None

    def record(gate: nn.Module, inputs: Any, output: Tensor) -> None:
        assert isinstance(gate, Gate)
        (weight,) = inputs
        gated_weight = _GatedWeight.of(gate, find(weight) or weight.detach())
        gated_weights[output.untyped_storage()._cdata] = (weakref.ref(output), gated_weight)

    def pack(tensor: Tensor) -> Any:
        gated_weight = find(tensor)
        if gated_weight is None:
            # Detached: a result that its own operator saves (softmax, relu) is otherwise freed by a backward pass only.
            return tensor.detach(), tensor._version
        return _GatedWeightView(gated_weight, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, _GatedWeightView):
            with torch.no_grad():
                return saved.source.recompute().as_strided(saved.size, saved.stride, saved.offset)
        tensor, version = saved
        if tensor._version != version:  # with saved-tensor hooks autograd does not check this itself
            raise RuntimeError("backward: a tensor needed for the gradient was changed in place since the forward pass")
        return tensor  # type: ignore[no-any-return]

    handles = [gate.register_forward_hook(record) for gate in model.modules() if isinstance(gate, Gate)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for handle in handles:
            handle.remove()
