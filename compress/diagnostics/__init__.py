"""Explain a result: sensitivity of each group; loss and variance of its gradient around the trained weights."""

from .group_sensitivity import GroupSensitivity, NarrowedWidth, Sensitivity
from .landscape_run import landscape
from .measurement import Measurement
from .sensitivity_run import DEFAULT_WIDTHS, sensitivity

__all__ = [
    "DEFAULT_WIDTHS",
    "GroupSensitivity",
    "Measurement",
    "NarrowedWidth",
    "Sensitivity",
    "landscape",
    "sensitivity",
]
