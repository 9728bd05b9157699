"""Modes of torchvision's detectors: losses without training mode, and the feature maps of the backbone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import BatchError
from compress.modules import tensors_in

PARTS = ("transform", "backbone")  # modules of all of torchvision's detectors
STOCHASTIC = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)


def check_detector(model: nn.Module) -> None:
    """Check that a model has the parts of torchvision's detectors.

    Raises:
        BatchError: it has not.
    """
    if missing := [name for name in PARTS if not isinstance(getattr(model, name, None), nn.Module)]:
        raise BatchError(
            f"the model: expected a detector of torchvision, with {' and '.join(PARTS)}; {type(model).__name__} has no "
            f"{' and '.join(missing)}. Other detectors need compress.mmdet or your own task (see compress.Task)"
        )


@contextmanager
def returning_losses(detector: nn.Module) -> Iterator[None]:
    """Make a detector return its losses during the block, in training mode and in eval mode.

    Its heads are in training mode. The backbone, norms and dropout stay in the mode that they are in. Images are
    resized as in eval mode, without random sizes: the teacher has to see the same pixels.
    """
    flags = [(module, module.training) for module in detector.modules()]
    kept = {id(module) for module in getattr(detector, "backbone").modules()}  # noqa: B009
    for module, _ in flags:
        if id(module) not in kept and not isinstance(module, STOCHASTIC):
            module.training = True
    for module in getattr(detector, "transform").modules():  # noqa: B009
        module.training = False
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def recording_features(detector: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the feature maps that the backbone returns inside the block, in the yielded list."""
    maps: list[Tensor] = []

    def append_output(module: nn.Module, inputs: Any, output: Any) -> None:
        maps.extend(tensors_in(output))

    handle = detector.get_submodule("backbone").register_forward_hook(append_output)
    try:
        yield maps
    finally:
        handle.remove()


def feature_distance(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Return the mean over images and maps of ||s - t||² / ||t||².

    Raises:
        ValueError: the shapes of the maps differ.
    """
    distances = []
    for s, t in zip(student, teacher, strict=True):
        if s.shape != t.shape:
            raise ValueError(
                f"distill: the teacher's feature maps have shape {list(t.shape)}, the student's {list(s.shape)}. Leave "
                "out distill, or exclude the layers that write these maps from the target"
            )
        error, norm = ((y.float() ** 2).flatten(1).sum(1) for y in (s - t, t))
        distances.append((error / norm.clamp_min(1e-12)).mean())
    return torch.stack(distances).mean()
