"""Channel-wise distillation: where a channel of the teacher's feature maps looks, the student's is to look too.

Shu et al., Channel-wise knowledge distillation for dense prediction, ICCV 2021, eq. 2-4, for a map y of C channels:

    T^2 / C  sum_c sum_i p(t)_ci log(p(t)_ci / p(s)_ci),  p(y)_ci = exp(y_ci / T) / sum_j exp(y_cj / T)

the mean over images, and over the levels of a pyramid.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..finetune import matched
from ..plan import Plan
from ..recipe import Distill
from ..tracing.tensors import tensors_in


def channelwise(student: Sequence[Tensor], teacher: Sequence[Tensor], temperature: float = 1.0) -> Tensor:
    """How far the student's maps are from the teacher's.

    >>> y = torch.arange(12.0).view(1, 2, 2, 3)
    >>> float(channelwise([y], [y]))
    0.0

    Raises:
        ValueError: they have other shapes.
    """
    for s, t in zip(student, teacher, strict=True):
        if s.shape != t.shape:
            raise ValueError(
                f"distill: the dense detector's maps have shape {list(t.shape)}, the compact one's {list(s.shape)}. "
                "Leave out distill, or exclude from the target what writes them"
            )
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


class Kept:
    """Which channels of the dense detector's maps are left in the compact one's: found out on the first of them."""

    def __init__(self, teacher: nn.Module, plan: Plan, names: Sequence[str]) -> None:
        self.teacher, self.plan, self.names = teacher, plan, names
        self._found: list[tuple[int, Tensor | None]] | None = None

    def of(self, given: Sequence[Tensor], like: Sequence[Tensor], inputs: Tensor) -> list[Tensor]:
        """The teacher's maps without what was cut."""
        if self._found is None and all(a.shape == b.shape for a, b in zip(given, like, strict=True)):
            self._found = [(1, None)] * len(given)
        elif self._found is None:
            dense = [copy.deepcopy(self.teacher) for _ in range(2)]
            twins: list[Any] = [self.plan.apply_(dense[0]), self.plan.zero_(dense[1])]
            pairs = []
            for twin in twins:
                with torch.no_grad(), maps(twin, self.names) as seen:
                    twin.extract_feat(inputs)
                pairs.append(seen)
            self._found = [matched(" and ".join(self.names), *pair) for pair in zip(*pairs, strict=True)]
        left = zip(given, self._found, strict=True)
        return [t if kept is None else t.index_select(dim, kept) for t, (dim, kept) in left]


@contextmanager
def taught(student: nn.Module, teacher: nn.Module, plan: Plan, distill: Distill | None) -> Iterator[None]:
    """Inside, the student's losses have one more, whoever asks for them: the distance from the teacher's maps."""
    if distill is None:
        yield
        return
    plain: Any = student.loss
    dense: Any = teacher
    names = names_of(student, distill.features)
    kept = Kept(teacher, plan, names)

    def loss(inputs: Tensor, samples: Any, **named: Any) -> dict[str, Any]:
        with maps(student, names) as mine:
            losses: dict[str, Any] = plain(inputs, samples, **named)
        with torch.no_grad(), maps(teacher, names) as given:
            dense.extract_feat(inputs)
        left = kept.of(given, mine, inputs)
        return {**losses, "loss_distil": distill.weight * channelwise(mine, left, distill.temperature)}

    vars(student)["loss"] = loss
    try:
        yield
    finally:
        del vars(student)["loss"]
