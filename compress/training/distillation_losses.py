"""Distillation losses: KL divergence of logits, and distances of features."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.distributed import all_reduce_sum, world_size
from compress.formatting import describe_value
from compress.surgery import Plan

STUDENT, TEACHER = 0, 1


class FeatureDistillation:
    """Feature loss: relative squared distance of the outputs of named modules in student and teacher.

    It is a quotient of two sums over the batch of a step, so `totals` has to hold the sums of the teacher before the
    loss of any part of the batch can be computed. The losses of the parts add up.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, plan: Plan, names: Sequence[str]) -> None:
        self.names, self.plan, self.teacher = tuple(names), plan, teacher
        self.student = student
        self.outputs: dict[tuple[str, int], Any] = {}  # by module and side
        self.totals: dict[str, Tensor] = {}  # by module: squared norm of the teacher's features in the whole step
        self.kept: dict[str, tuple[int, Tensor | None]] = {}  # by module: dimension, and positions that the plan keeps

    @contextmanager
    def recording(self, models: Mapping[int, nn.Module]) -> Iterator[None]:
        """Record the outputs of the named modules of models, by side, during the block."""

        def hook(name: str, side: int) -> Callable[..., None]:
            def record(module: nn.Module, inputs: Any, output: Any) -> None:
                self.outputs[name, side] = output

            return record

        handles = [
            model.get_submodule(name).register_forward_hook(hook(name, side))
            for name in self.names
            for side, model in models.items()
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
        with self.recording({STUDENT: copies[0], TEACHER: copies[1]}):
            for model in copies:
                run(model)
        for name in self.names:
            sliced, zeroed = self.outputs.pop((name, STUDENT), None), self.outputs.pop((name, TEACHER), None)
            if not isinstance(sliced, Tensor) or not isinstance(zeroed, Tensor) or sliced.ndim < 2:
                raise ValueError(f"finetune.distill.features: {name} is not called, or returns no tensor of features")
            self.kept[name] = match_kept_features(name, sliced, zeroed)

    def squared_norms(self) -> dict[str, Tensor]:
        """Return ||t||^2 of the teacher's features on the last batch that it ran on, by module."""
        return {name: self._teacher_features(name).square().sum() for name in self.names}

    @torch.no_grad()
    def set_totals(self, norms: Sequence[Mapping[str, Tensor]]) -> None:
        """Set `totals` from the squared norms of the parts of this process, summed over the processes."""
        self.totals = {name: torch.stack([part[name] for part in norms]).sum() for name in self.names}
        if world_size() > 1:
            sums = all_reduce_sum(torch.stack([total.double() for total in self.totals.values()]), len(self.names))
            self.totals = {name: value.to(self.totals[name]) for name, value in zip(self.names, sums, strict=True)}

    def loss(self) -> Tensor:
        """Return the mean over modules of ||s - t||^2 / total ||t||^2."""
        distances = []
        for name in self.names:
            distance = (self.outputs.pop((name, STUDENT)) - self._teacher_features(name)).square().sum()
            distances.append(distance / self.totals[name].clamp_min(1e-12))
        return torch.stack(distances).mean()

    def _teacher_features(self, name: str) -> Tensor:
        """Return the recorded features of the teacher that the plan keeps."""
        teacher: Tensor = self.outputs[name, TEACHER].clone()
        dim, kept = self.kept[name]
        return teacher if kept is None else teacher.index_select(dim, kept)


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
