"""Distillation losses: KL divergence of logits, and distances of features."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.formatting import describe_value
from compress.surgery import Plan


class FeatureDistillation:
    """Feature loss: relative squared distance of the outputs of named modules in student and teacher."""

    def __init__(self, student: nn.Module, teacher: nn.Module, plan: Plan, names: Sequence[str]) -> None:
        self.names, self.plan, self.teacher = tuple(names), plan, teacher
        self.sides = (student, teacher)
        self.outputs: dict[tuple[str, int], Any] = {}  # by module and side: student 0, teacher 1
        self.kept: dict[str, tuple[int, Tensor | None]] = {}  # by module: dimension, and positions that the plan keeps

    @contextmanager
    def recording(self, sides: Sequence[nn.Module] | None = None) -> Iterator[None]:
        """Record the outputs of the named modules during the block."""

        def hook(name: str, side: int) -> Callable[..., None]:
            def record(module: nn.Module, inputs: Any, output: Any) -> None:
                self.outputs[name, side] = output

            return record

        handles = [
            model.get_submodule(name).register_forward_hook(hook(name, side))
            for name in self.names
            for side, model in enumerate(sides or self.sides)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def match(self, run: Callable[[nn.Module], Any]) -> None:
        """Find the teacher's features that the plan keeps, by comparing copies that are sliced and zeroed.

        Args:
            run: runs a model on a batch.

        Raises:
            ValueError: a module returns no features, is not called, or has features that match none of the teacher's.
        """
        copies = [self.plan.apply_(copy.deepcopy(self.teacher)), self.plan.zero_(copy.deepcopy(self.teacher))]
        with self.recording(copies):
            for model in copies:
                run(model)
        for name in self.names:
            sliced, zeroed = self.outputs.pop((name, 0), None), self.outputs.pop((name, 1), None)
            if not isinstance(sliced, Tensor) or not isinstance(zeroed, Tensor) or sliced.ndim < 2:
                raise ValueError(f"finetune.distill.features: {name} is not called, or returns no tensor of features")
            self.kept[name] = match_kept_features(name, sliced, zeroed)

    def loss(self) -> Tensor:
        """Return the mean over modules of ||s - t||^2 / ||t||^2."""
        distances = []
        for name in self.names:
            student, teacher = self.outputs.pop((name, 0)), self.outputs.pop((name, 1)).clone()
            dim, kept = self.kept[name]
            if kept is not None:
                teacher = teacher.index_select(dim, kept)
            distances.append((student - teacher).square().sum() / teacher.square().sum().clamp_min(1e-12))
        return torch.stack(distances).mean()


def match_kept_features(name: str, sliced: Tensor, zeroed: Tensor) -> tuple[int, Tensor | None]:
    """Return the dimension that was cut and the positions that are kept along it; None if nothing was cut.

    Raises:
        ValueError: several dimensions were cut, or some sliced features equal none of the zeroed ones.
    """
    cut = [d for d in range(sliced.ndim) if sliced.shape[d] != zeroed.shape[d]]
    if not cut:
        return 1, None
    if len(cut) == 1:
        compact, dense = (t.movedim(cut[0], 0).flatten(1).double() for t in (sliced, zeroed))
        kept = torch.cdist(compact, dense).argmin(1)
        if bool(((compact - dense[kept]).norm(dim=1) <= 1e-3 * dense[kept].norm(dim=1) + 1e-6).all()):
            return cut[0], kept
    raise ValueError(
        f"finetune.distill.features: {name} has shape {list(zeroed.shape)} in the dense network and "
        f"{list(sliced.shape)} in the compact one, and it is unclear which of its features were kept; leave it out"
    )


def distillation(student: Tensor, teacher: Tensor, temperature: float = 4.0) -> Tensor:
    """Return the mean KL divergence of softened predictions from the teacher's (Xue 2022, 4.2.1; as in TAS).

        1/N sum_n sum_i p_i log(p_i / q_i),  p = softmax(teacher / T),  q = softmax(student / T)

    >>> logits = torch.tensor([[1.0, 2.0, 3.0]])
    >>> float(distillation(logits, logits))
    0.0

    Raises:
        ValueError: the two have different shapes, or the temperature is not positive.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"distillation: expected logits of the same shape; got {describe_value(student)} of the student and "
            f"{describe_value(teacher)} of the teacher. Run both on the same batch, with the same classes"
        )
    if not 0 < temperature < float("inf"):
        raise ValueError(f"distillation: expected a positive temperature, such as 4; got {temperature}")
    p, q = F.log_softmax(teacher / temperature, -1), F.log_softmax(student / temperature, -1)
    return F.kl_div(q.flatten(0, -2), p.flatten(0, -2), reduction="batchmean", log_target=True)
