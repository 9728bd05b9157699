"""Fine-tuning: the compact network is trained with the dense one as its teacher.

    loss = task loss + weight * KL(softmax(teacher / T) || softmax(student / T)) + feature_weight * feature loss

The teacher is in eval mode and runs once per batch. The feature loss of a named module is ||s - t||^2 / ||t||^2, the
teacher's features t being those that the plan keeps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from timm.data.mixup import Mixup
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import _pytree as pytree

from .checkpoint import State, put_, tensors_of
from .compute import Several, together
from .engine import Engine
from .loading import derived, generators_kept, length_of, seed_loader
from .optimise import clip, optimiser, rate, set_rate
from .plan import Plan
from .recipe import Finetune
from .task import Task, teaching


@dataclass
class Work:
    """What a task with a loop of its own is given: train the student in place, and leave its weights on the device."""

    student: nn.Module
    teacher: nn.Module
    plan: Plan
    config: Finetune
    engine: Engine  # its device, seed, history and display
    total: int  # steps
    folder: Path | None  # for checkpoints of its own, from which it goes on if there are any


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
        self.weights = [p for p in self.student.parameters() if p.requires_grad]
        self.keep_best = bool(self.task.val is not None and self.config.best is not False)
        self.average: AveragedModel | None = None
        if self.config.ema is not None:
            decay = get_ema_multi_avg_fn(self.config.ema)  # type: ignore[no-untyped-call]
            self.average = AveragedModel(self.student, multi_avg_fn=decay, use_buffers=True)
        if self.keep_best:
            self.best = {name: t.detach().clone() for name, t in tensors_of(self.product).items()}
        modules = {"student": self.student} | ({"average": self.average} if self.average else {})
        self.state = State(modules, [self.optimizer], lambda: self.best, {"best": None, "at": 0})
        names = self.config.distill.features if self.config.distill is not None else ()
        self.features = Features(self.student, self.teacher, self.plan, names)
        self.mix: Mixup | None = None

    @property
    def product(self) -> nn.Module:
        """The network whose weights count: the student, or its moving average."""
        if self.average is None:
            return self.student
        return self.average.module

    def step(self, batch: Any) -> dict[str, Tensor]:
        config, weights = self.config, self.weights
        set_rate(self.optimizer, rate(config, self.done, self.total))
        self.done += 1
        if config.mixup or config.cutmix or config.label_smoothing:
            softened = [self._softened(one) for one in together(batch)]
            batch = Several(softened) if len(softened) > 1 else softened[0]
        if self.features.names and not self.features.kept:
            one = together(batch)[0]
            self.features.match(lambda model: self.task.forward(model, pytree.tree_map(_copied, one)))
        found = self.engine.compute.gradients(self.terms, batch, weights)
        for p, g, idle in zip(weights, found.gradients, found.idle, strict=True):
            p.grad = None if idle else g
        clip(config, self.student)
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.student)
        return {"loss": found.loss, **found.terms}

    def terms(self, batch: Any) -> dict[str, Tensor]:
        """The terms of the loss."""
        config, task = self.config, self.task
        teacher: Any = None
        with self.features.listening():
            if config.distill is not None:
                with torch.inference_mode():  # on a copy: some models change their input
                    teacher = teaching(task)(self.teacher, pytree.tree_map(_copied, batch))
                teacher = pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, teacher)
            outputs = task.forward(self.student, batch)
        terms = {"task": task.loss(outputs, batch).reshape(())}
        if config.distill is not None:
            terms["distil"] = config.distill.weight * task.distil(outputs, teacher, config.distill.temperature)
            if config.distill.features:
                terms["features"] = config.distill.feature_weight * self.features.loss()
        return terms

    def measure(self) -> dict[str, float]:
        found = self.engine.evaluate(self.task, self.product, "validate")
        first = next(iter(found.values()), math.nan)
        before = self.state.facts["best"]
        if self.keep_best and math.isfinite(first) and (before is None or first >= before):
            self.state.facts |= {"best": first, "at": self.done}
            for name, tensor in tensors_of(self.product).items():
                self.best[name].copy_(tensor)
        return found

    @torch.no_grad()
    def finish(self) -> None:
        """Give the student the weights that count."""
        best = self.keep_best and self.state.facts["best"] is not None
        put_(self.student, self.best if best else tensors_of(self.product))
        if best:
            self.engine.facts["kept"] = {"step": self.state.facts["at"], "of": self.total}

    def _softened(self, batch: Any) -> Any:
        task: Any = self.task  # one that can soften: that was checked before the start
        soften, classes = task.soften, task.classes
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
    loader: Iterable[Any],
    config: Finetune,
    engine: Engine,
    total: int,
    resume: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
) -> None:
    """Train the student in place, warm from the weights it has; the best on validation, or the last, are kept.

    Raises:
        Diverged: the loss is not finite.
    """
    if config.recalibrate and resume is None:
        recalibrate_(student, task, loader, config.recalibrate, engine)
    student.train()
    tuning = Tuning(student, teacher, plan, task, config, engine, total)
    at = None
    if resume is not None and "done" in resume[1]:
        tuning.state.restore_(resume[0], resume[1]["state"])
        at, tuning.done = resume[1], resume[1]["done"]
    size = length_of(loader)
    check = min(size, max(1, total // 2)) if size else max(1, total // 10)
    measure = tuning.measure if task.val is not None else None
    engine.train("finetune", loader, total, tuning.step, tuning.state, at=at, check=check, measure=measure)
    tuning.finish()
    student.eval()


@torch.no_grad()
def recalibrate_(model: nn.Module, task: Task, loader: Iterable[Any], batches: int, engine: Engine) -> None:
    """Measure the statistics of batch norms anew, as plain averages over some training batches."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats]
    if not norms:
        return
    before = [(norm.momentum, norm.training) for norm in norms]
    flags = [(m, m.training) for m in model.modules()]
    for m, _ in flags:
        m.training = False
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum, norm.training = None, True
    try:
        with engine.display.bar("recalibrate", batches) as bar, generators_kept(loader):
            seed_loader(loader, derived(engine.seed, "recalibrate"), 0)
            for number, batch in enumerate(loader, 1):
                task.forward(model, engine.move(batch))
                bar.advance()
                if number == batches:
                    break
    finally:
        for m, flag in flags:
            m.training = flag
        for norm, (momentum, _) in zip(norms, before, strict=True):
            norm.momentum = momentum


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


class Features:
    """The outputs of named modules in student and teacher, and how far they are apart."""

    def __init__(self, student: nn.Module, teacher: nn.Module, plan: Plan, names: Sequence[str]) -> None:
        self.names, self.plan, self.teacher = tuple(names), plan, teacher
        self.sides = (student, teacher)
        self.seen: dict[tuple[str, int], Any] = {}
        self.kept: dict[str, tuple[int, Tensor | None]] = {}  # name -> dimension, and which of the teacher's are left

    @contextmanager
    def listening(self, sides: Sequence[nn.Module] | None = None) -> Iterator[None]:
        def hook(name: str, side: int) -> Callable[..., None]:
            def keep(module: nn.Module, inputs: Any, output: Any) -> None:
                self.seen[name, side] = output

            return keep

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
        """Find out which of the teacher's features the plan leaves: where its zeroed and its sliced twin agree.

        Raises:
            ValueError: a module returns no features, is not called, or has features that match none of the teacher's.
        """
        twins = [self.plan.apply_(copy.deepcopy(self.teacher)), self.plan.zero_(copy.deepcopy(self.teacher))]
        with self.listening(twins):
            for twin in twins:
                run(twin)
        for name in self.names:
            sliced, zeroed = self.seen.pop((name, 0), None), self.seen.pop((name, 1), None)
            if not isinstance(sliced, Tensor) or not isinstance(zeroed, Tensor) or sliced.ndim < 2:
                raise ValueError(f"finetune.distill.features: {name} is not called, or returns no tensor of features")
            self.kept[name] = matched(name, sliced, zeroed)

    def loss(self) -> Tensor:
        """The mean over modules of ||s - t||^2 / ||t||^2."""
        parts = []
        for name in self.names:
            student, teacher = self.seen.pop((name, 0)), self.seen.pop((name, 1)).clone()
            dim, kept = self.kept[name]
            if kept is not None:
                teacher = teacher.index_select(dim, kept)
            parts.append((student - teacher).square().sum() / teacher.square().sum().clamp_min(1e-12))
        return torch.stack(parts).mean()


def matched(name: str, sliced: Tensor, zeroed: Tensor) -> tuple[int, Tensor | None]:
    """The dimension that was cut, and the positions along it that are left; none if nothing was cut."""
    cut = [d for d in range(sliced.ndim) if sliced.shape[d] != zeroed.shape[d]]
    if not cut:
        return 1, None
    if len(cut) == 1:
        few, many = (t.movedim(cut[0], 0).flatten(1).double() for t in (sliced, zeroed))
        kept = torch.cdist(few, many).argmin(1)
        if bool(((few - many[kept]).norm(dim=1) <= 1e-3 * many[kept].norm(dim=1) + 1e-6).all()):
            return cut[0], kept
    raise ValueError(
        f"finetune.distill.features: {name} has shape {list(zeroed.shape)} in the dense network and "
        f"{list(sliced.shape)} in the compact one, and it is not plain which of its features were kept; leave it out"
    )
