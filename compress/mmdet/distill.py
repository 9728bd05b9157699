"""Channel-wise distillation: where a channel of the teacher's feature maps looks, the student's is to look too.

Shu et al., Channel-wise knowledge distillation for dense prediction, ICCV 2021, eq. 2-4, for a map y of C channels:

    T^2 / C  sum_c sum_i p(t)_ci log(p(t)_ci / p(s)_ci),  p(y)_ci = exp(y_ci / T) / sum_j exp(y_cj / T)

the mean over images, and over the levels of a pyramid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..recipe import Distill
from ..tracing.tensors import tensors_in


def channelwise(student: Sequence[Tensor], teacher: Sequence[Tensor], temperature: float = 1.0) -> Tensor:
    """How far the student's maps are from the teacher's.

    >>> y = torch.arange(12.0).view(1, 2, 2, 3)
    >>> float(channelwise([y], [y]))
    0.0
    """
    parts = []
    for s, t in zip(student, teacher, strict=True):
        q, p = (F.log_softmax(y.float().flatten(2) / temperature, -1) for y in (s, t))
        parts.append(F.kl_div(q, p, reduction="sum", log_target=True) * temperature**2 / (s.shape[0] * s.shape[1]))
    return torch.stack(parts).mean()


def names_of(model: nn.Module, wanted: Sequence[str] = ()) -> tuple[str, ...]:
    """The modules whose maps are compared: those that are wanted, else the neck, else the backbone."""
    return tuple(wanted) or ("neck" if getattr(model, "neck", None) is not None else "backbone",)


@contextmanager
def maps(model: nn.Module, names: Sequence[str]) -> Iterator[list[Tensor]]:
    """The maps that these modules return inside the block, in the order in which they come."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.extend(tensors_in(output))

    handles = [model.get_submodule(name).register_forward_hook(keep) for name in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def taught(student: nn.Module, teacher: nn.Module, distill: Distill | None) -> Iterator[None]:
    """Inside, the student's losses have one more, whoever asks for them: the distance from the teacher's maps."""
    if distill is None:
        yield
        return
    plain: Any = student.loss
    dense: Any = teacher
    names = names_of(student, distill.features)

    def loss(inputs: Tensor, samples: Any, **named: Any) -> dict[str, Any]:
        with maps(student, names) as mine:
            losses: dict[str, Any] = plain(inputs, samples, **named)
        with torch.no_grad(), maps(teacher, names) as given:
            dense.extract_feat(inputs)
        return {**losses, "loss_distil": distill.weight * channelwise(mine, given, distill.temperature)}

    vars(student)["loss"] = loss
    try:
        yield
    finally:
        del vars(student)["loss"]
