"""Channel-wise distillation of feature maps: match the spatial distribution of each channel to the teacher's.

Shu et al., Channel-wise knowledge distillation for dense prediction, ICCV 2021, eq. 2-4, for a map y of C channels:

    T^2 / C  sum_c sum_i p(t)_ci log(p(t)_ci / p(s)_ci),  p(y)_ci = exp(y_ci / T) / sum_j exp(y_cj / T)

averaged over images and over the levels of a pyramid.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.modules import tensors_in
from compress.recipe import Distill
from compress.surgery import Plan
from compress.training import match_kept_features


def channelwise_loss(student: Sequence[Tensor], teacher: Sequence[Tensor], temperature: float = 1.0) -> Tensor:
    """Return the channel-wise distillation loss between feature maps of student and teacher.

    >>> y = torch.arange(12.0).view(1, 2, 2, 3)
    >>> float(channelwise_loss([y], [y]))
    0.0

    Raises:
        ValueError: the shapes of the maps differ.
    """
    for s, t in zip(student, teacher, strict=True):
        if s.shape != t.shape:
            raise ValueError(
                f"distill: the dense detector's maps have shape {list(t.shape)}, the compact one's {list(s.shape)}. "
                "Leave out distill, or exclude the layers that write these maps from the target"
            )
    losses = []
    for s, t in zip(student, teacher, strict=True):
        q, p = (F.log_softmax(y.float().flatten(2) / temperature, -1) for y in (s, t))
        losses.append(F.kl_div(q, p, reduction="sum", log_target=True) * temperature**2 / (s.shape[0] * s.shape[1]))
    return torch.stack(losses).mean()


def distilled_modules(model: nn.Module, features: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the modules whose maps are distilled: `features` if there are any, else the neck, else the backbone."""
    return tuple(features) or ("neck" if getattr(model, "neck", None) is not None else "backbone",)


@contextmanager
def record_feature_maps(model: nn.Module, names: Sequence[str]) -> Iterator[list[Tensor]]:
    """Collect the feature maps that these modules return inside the block, in order, in the yielded list."""
    maps: list[Tensor] = []

    def append_output(module: nn.Module, inputs: Any, output: Any) -> None:
        maps.extend(tensors_in(output))

    handles = [model.get_submodule(name).register_forward_hook(append_output) for name in names]
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()


class KeptChannels:
    """The channels of the teacher's feature maps that the compact detector kept; determined on the first batch."""

    def __init__(self, teacher: nn.Module, plan: Plan, names: Sequence[str]) -> None:
        self.teacher, self.plan, self.names = teacher, plan, names
        self._kept: list[tuple[int, Tensor | None]] | None = None  # (dimension, indices) of each map; None: all

    def select(self, teacher_maps: Sequence[Tensor], student_maps: Sequence[Tensor], inputs: Tensor) -> list[Tensor]:
        """Return the teacher's maps without the channels that were removed.

        Args:
            inputs: the batch that both maps come from.
        """
        if self._kept is None:
            same_shapes = all(t.shape == s.shape for t, s in zip(teacher_maps, student_maps, strict=True))
            self._kept = [(1, None)] * len(teacher_maps) if same_shapes else self._match(inputs)
        pairs = zip(teacher_maps, self._kept, strict=True)
        return [t if kept is None else t.index_select(dim, kept) for t, (dim, kept) in pairs]

    def _match(self, inputs: Tensor) -> list[tuple[int, Tensor | None]]:
        """Find the kept channels by comparing the maps of the sliced and of the zeroed teacher."""
        copies = [copy.deepcopy(self.teacher) for _ in range(2)]
        detectors: list[Any] = [self.plan.apply_(copies[0]), self.plan.zero_(copies[1])]
        maps = []
        for detector in detectors:
            with torch.no_grad(), record_feature_maps(detector, self.names) as recorded:
                detector.extract_feat(inputs)
            maps.append(recorded)
        name = " and ".join(self.names)
        return [match_kept_features(name, sliced, zeroed) for sliced, zeroed in zip(*maps, strict=True)]


@contextmanager
def add_distillation_loss(
    student: nn.Module, teacher: nn.Module, plan: Plan, distill: Distill | None
) -> Iterator[None]:
    """Inside the block, `student.loss` also returns `loss_distil`, the distance from the teacher's feature maps.

    The method is replaced on the instance, so that mmengine's Runner, which calls it, needs no change.
    """
    if distill is None:
        yield
        return
    original_loss: Any = student.loss
    dense: Any = teacher
    names = distilled_modules(student, distill.features)
    kept = KeptChannels(teacher, plan, names)

    def loss(inputs: Tensor, samples: Any, **kwargs: Any) -> dict[str, Any]:
        with record_feature_maps(student, names) as student_maps:
            losses: dict[str, Any] = original_loss(inputs, samples, **kwargs)
        with torch.no_grad(), record_feature_maps(teacher, names) as teacher_maps:
            dense.extract_feat(inputs)
        targets = kept.select(teacher_maps, student_maps, inputs)
        return {**losses, "loss_distil": distill.weight * channelwise_loss(student_maps, targets, distill.temperature)}

    vars(student)["loss"] = loss
    try:
        yield
    finally:
        del vars(student)["loss"]
