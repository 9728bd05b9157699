"""PerturbedNetwork: a copy of a network whose weights move in a plane."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compress.modules import set_eval_flags_, tensors_of, trainable_copy

from .directions import Direction


class PerturbedNetwork:
    """A copy of a network in eval mode, at the weights w + a d1 + b d2; nothing is shared with the original.

    Args:
        name: in tables and charts.
        model: the network with the weights w.
        directions: d1 and d2; they may leave out parameters, which stay as they are.
        device: where the copy is.

    Attributes:
        model: the copy.
        parameters: all of its parameters that are floating-point numbers; they require gradients.
    """

    def __init__(self, name: str, model: nn.Module, directions: Sequence[Direction], device: torch.device) -> None:
        self.name = name
        self.model = set_eval_flags_(trainable_copy(model).to(device))
        named = {
            name: tensor
            for name, tensor in tensors_of(self.model).items()
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        }
        self.parameters: list[Tensor] = [parameter.requires_grad_(True) for parameter in named.values()]
        self._weights = [parameter.detach().clone() for parameter in self.parameters]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        moved = [name for name in named if all(name in direction for direction in directions)]
        self._moved: list[Tensor] = [named[name] for name in moved]
        self._directions = [[direction[name].to(named[name]) for name in moved] for direction in directions]

    @torch.no_grad()
    def move_to_(self, *coordinates: float) -> None:
        """Set the weights to a point of the plane; computed from w each time, so that no rounding adds up.

        Buffers that the model's code updates are set back, so that the order of the points does not matter.
        """
        torch._foreach_copy_(self.parameters, self._weights)
        for buffer, value in self._buffers:
            buffer.copy_(value)
        for coordinate, direction in zip(coordinates, self._directions, strict=True):
            if coordinate and self._moved:
                torch._foreach_add_(self._moved, direction, alpha=coordinate)
