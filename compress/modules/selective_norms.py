"""Batch norms that select the channels they read: each block of a network may read its own part of a residual stream.

Z. Liu et al., Learning efficient convolutional networks through network slimming, 2017, section 4.2 (channel
selection). A norm in front of the first layer of a block reads C channels of the stream, of which the layer needs some:

    y = norm(x[:, index])

Norm and layer are cut to these channels, and the stream stays as wide as it is. A norm switches to the selective form
by changing its `__class__`; its parameters keep their names. The index is a buffer that no state dict contains: the
plan has it.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .compact_forms import load_forms_for

NormClass = TypeVar("NormClass", bound=type[nn.Module])
SELECTION_INDEX = "index"  # name of the buffer
_selective_forms: dict[type[nn.Module], type[nn.Module]] = {}  # by class of the norm


def register_selective_norm(norm: type[nn.Module]) -> Callable[[NormClass], NormClass]:
    """Register the decorated class as the selective form of `norm`, from which it derives."""

    def register(form: NormClass) -> NormClass:
        _selective_forms[norm] = form
        return form

    return register


@register_selective_norm(nn.BatchNorm1d)
class SelectiveBatchNorm1d(nn.BatchNorm1d):
    """Batch norm of some of the features that it is given."""

    index: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.index_select(1, self.index))


@register_selective_norm(nn.BatchNorm2d)
class SelectiveBatchNorm2d(nn.BatchNorm2d):
    """Batch norm of some of the channels of an image."""

    index: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.index_select(1, self.index))


@register_selective_norm(nn.BatchNorm3d)
class SelectiveBatchNorm3d(nn.BatchNorm3d):
    """Batch norm of some of the channels of a video or volume."""

    index: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.index_select(1, self.index))


def can_select(module: nn.Module) -> bool:
    """Return whether a module is a norm with a selective form that does not select yet."""
    load_forms_for(type(module).__module__)
    return type(module) in _selective_forms


def is_selective(module: nn.Module) -> bool:
    """Return whether a module is a norm that selects the channels it reads."""
    return isinstance(module, tuple(_selective_forms.values()))


def select_channels_(module: Any, channels: Tensor) -> None:
    """Make a norm read these channels of its input only; its own tensors are sliced by the caller.

    Raises:
        TypeError: the module has no selective form.
    """
    if not can_select(module):
        raise TypeError(f"{type(module).__name__} has no selective form")
    device = next((t.device for t in [*module.parameters(), *module.buffers()]), torch.device("cpu"))
    module.__class__ = _selective_forms[type(module)]
    module.register_buffer(SELECTION_INDEX, channels.to(device), persistent=False)
