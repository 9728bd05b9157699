"""Recognize linear layers and convolutions that compute what PyTorch's own classes compute."""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ForwardCheck(Enum):
    """The part of a layer's code that must be PyTorch's own."""

    NONE = "none"  # subclasses may override `forward`
    CLASS = "class"  # the class inherits `forward`
    FULL = "full"  # the class also inherits `_conv_forward`, and the instance does not override `forward`


def is_plain_layer(layer: nn.Module, *, forward: ForwardCheck = ForwardCheck.FULL, grouped: bool = False) -> bool:
    """Return whether `layer` is a linear layer or a convolution (not transposed).

    Args:
        layer: the module to check; subclasses of PyTorch's layers count as far as `forward` allows.
        forward: which part of the layer's code must be PyTorch's own.
        grouped: accept convolutions with `groups` > 1.
    """
    if isinstance(layer, nn.modules.conv._ConvNd):
        if layer.transposed or not (grouped or layer.groups == 1):
            return False
    elif not isinstance(layer, nn.Linear):
        return False
    if forward is ForwardCheck.NONE:
        return True
    base: Any = next((kind for kind in (nn.Linear, *CONVOLUTIONS) if isinstance(layer, kind)), None)
    layer_class: Any = type(layer)
    if base is None or layer_class.forward is not base.forward:
        return False
    if forward is ForwardCheck.CLASS:
        return True
    same_kernel = base is nn.Linear or layer_class._conv_forward is base._conv_forward
    return same_kernel and "forward" not in vars(layer)
