"""Fine-tuning: the compact network is trained with the dense one as its teacher.

    loss = task loss + weight * KL(softmax(teacher / T) || softmax(student / T)) + feature_weight * feature loss

The teacher is in eval mode and runs once per batch. The feature loss of a named module is ||s - t||^2 / ||t||^2, the
teacher's features t being those that the plan keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.data.mixup import Mixup
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import _pytree as pytree

from .checkpoint import State
from .engine import Engine, length_of
from .optimise import clip, optimiser, rate, set_rate
from .plan import Plan
from .recipe import Distill, Finetune
from .task import Task


@dataclass
class Tuning:
    """A fine-tuning under way: `step` trains on a batch, `measure` evaluates and remembers the best weights."""

    student: nn.Module
    teacher: nn.Module
    plan: Plan
    task: Task
    config: Finetune
    engine: Engine
    total: int
    done: int = 0
    best: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.optimizer = optimiser(self.config, self.student.parameters())
        self.keep_best = bool(self.task.val is not None and self.config.best is not False)
        self.average: AveragedModel | None = None
        if self.config.ema is not None:
            decay = get_ema_multi_avg_fn(self.config.ema)  # type: ignore[no-untyped-call]
            self.average = AveragedModel(self.student, multi_avg_fn=decay, use_buffers=True)
        if self.keep_best:
            self.best = {name: t.detach().clone() for name, t in self.product.state_dict().items()}
        modules = {"student": self.student} | ({"average": self.average} if self.average else {})
        self.state = State(modules, [self.optimizer], lambda: self.best, {"best": None})
        self.features = Features(self.student, self.teacher, self.plan, self.config.distill)
        self.mix: Mixup | None = None

    @property
    def product(self) -> nn.Module:
        """The network whose weights count: the student, or its moving average."""
        if self.average is None:
            return self.student
        return self.average.module

    def step(self, batch: Any) -> dict[str, Tensor]:
        config, task = self.config, self.task
        set_rate(self.optimizer, rate(config, self.done, self.total))
        self.done += 1
        self.optimizer.zero_grad()
        teacher: Any = None
        if config.mixup or config.cutmix or config.label_smoothing:
            batch = self._softened(batch)
        with self.features.listening():
            if config.distill is not None:
                with torch.inference_mode():
                    teacher = task.forward(self.teacher, batch)
                teacher = pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, teacher)
            outputs = task.forward(self.student, batch)
        terms = {"task": task.loss(outputs, batch)}
        if config.distill is not None:
            terms["distil"] = config.distill.weight * task.distil(outputs, teacher, config.distill.temperature)
            if config.distill.features:
                terms["features"] = config.distill.feature_weight * self.features.loss()
        loss = torch.stack(list(terms.values())).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        clip(config, self.student)
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.student)
        return {"loss": loss.detach(), **{key: term.detach() for key, term in terms.items()}}

    def measure(self) -> dict[str, float]:
        found = self.engine.evaluate(self.task, self.product, "validate")
        first = next(iter(found.values()), None)
        before = self.state.facts["best"]
        if self.keep_best and first is not None and (before is None or first > before):
            self.state.facts["best"] = first
            for name, tensor in self.product.state_dict().items():
                self.best[name].copy_(tensor)
        return found

    @torch.no_grad()
    def finish(self) -> None:
        """Give the student the weights that count."""
        source = self.best if self.keep_best and self.state.facts["best"] is not None else self.product.state_dict()
        for name, tensor in self.student.state_dict().items():
            tensor.copy_(source[name])

    def _softened(self, batch: Any) -> Any:
        soften: Any = self.task.soften  # type: ignore[attr-defined]  # its presence was checked before the start
        classes = self.task.classes  # type: ignore[attr-defined]
        if self.mix is None and (self.config.mixup or self.config.cutmix):
            c = self.config
            self.mix = Mixup(  # type: ignore[no-untyped-call]
                c.mixup, c.cutmix, label_smoothing=c.label_smoothing, num_classes=classes
            )
        return soften(batch, classes, self.config.label_smoothing, self.mix)


def finetune(
    student: nn.Module,
    teacher: nn.Module,
    plan: Plan,
    task: Task,
    config: Finetune,
    engine: Engine,
    total: int,
    resume: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
) -> None:
    """Train the student in place, warm from the weights it has; the best on validation, or the last, are kept.

    Raises:
        Diverged: the loss is not finite.
    """
    assert task.train is not None
    if config.recalibrate and resume is None:
        recalibrate_(student, task, config.recalibrate, engine)
    student.train()
    tuning = Tuning(student, teacher, plan, task, config, engine, total)
    at = None
    if resume is not None and "done" in resume[1]:
        tuning.state.restore_(resume[0], resume[1]["state"])
        at, tuning.done = resume[1], resume[1]["done"]
    size = length_of(task.train)
    check = min(size, max(1, total // 2)) if size else max(1, total // 10)
    measure = tuning.measure if task.val is not None else None
    engine.train("finetune", task.train, total, tuning.step, tuning.state, at=at, check=check, measure=measure)
    tuning.finish()
    student.eval()


@torch.no_grad()
def recalibrate_(model: nn.Module, task: Task, batches: int, engine: Engine) -> None:
    """Measure the statistics of batch norms anew, as plain averages over some training batches."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats]
    if not norms or task.train is None:
        return
    before = [(norm.momentum, norm.training) for norm in norms]
    flags = [(m, m.training) for m in model.modules()]
    for m, _ in flags:
        m.training = False
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum, norm.training = None, True
    try:
        with engine.display.bar("recalibrate", batches) as bar:
            for number, batch in enumerate(task.train, 1):
                task.forward(model, engine.move(batch))
                bar.advance()
                if number == batches:
                    break
    finally:
        for m, flag in flags:
            m.training = flag
        for norm, (momentum, _) in zip(norms, before, strict=True):
            norm.momentum = momentum


class Features:
    """The outputs of named modules in student and teacher, and how far they are apart."""

    def __init__(self, student: nn.Module, teacher: nn.Module, plan: Plan, config: Distill | None) -> None:
        self.names = config.features if config is not None else ()
        self.modules = [(student.get_submodule(n), teacher.get_submodule(n)) for n in self.names]
        self.plan = plan
        self.seen: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        def hook(name: str, side: int) -> Callable[..., None]:
            def keep(module: nn.Module, inputs: Any, output: Any) -> None:
                self.seen[name, side] = output

            return keep

        pairs = list(zip(self.names, self.modules, strict=True))
        handles = [m.register_forward_hook(hook(n, side)) for n, both in pairs for side, m in enumerate(both)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def loss(self) -> Tensor:
        """
        Raises:
            ValueError: it is not plain which of the teacher's features were kept.
        """
        parts = []
        for name in self.names:
            student, teacher = self.seen.pop((name, 0)), self.seen.pop((name, 1)).clone()
            if not isinstance(student, Tensor) or student.ndim < 2:
                raise ValueError(f"finetune.distill.features: {name} returns no tensor of features")
            dim = 1 if student.ndim == 4 else student.ndim - 1
            if student.shape != teacher.shape:
                kept = self._kept(name, teacher.shape[dim], student.shape[dim])
                teacher = teacher.index_select(dim, kept.to(teacher.device))
            parts.append((student - teacher).square().sum() / teacher.square().sum().clamp_min(1e-12))
        return torch.stack(parts).mean()

    def _kept(self, name: str, dense: int, compact: int) -> Tensor:
        """Which of a module's output features the plan keeps: what its last writers agree on."""
        found = {
            tuple(cut[0].tolist())
            for tensor, cut in self.plan.slices.items()
            if (tensor.startswith(f"{name}.")) and 0 in cut
            if self.plan.shapes[tensor][0] == dense and len(cut[0]) == compact
        }
        if len(found) != 1:
            raise ValueError(
                f"finetune.distill.features: {name} has {dense} features in the dense network and {compact} in the "
                f"compact one, and {len(found) or 'no'} answers which were kept. Name the layer that writes them, or "
                "leave it out."
            )
        return torch.tensor(found.pop())
