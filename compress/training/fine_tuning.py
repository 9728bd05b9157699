"""Fine-tuning: train the compact network with the dense one as its teacher.

    loss = task loss + weight * KL(softmax(teacher / T) || softmax(student / T)) + feature_weight * feature loss

The teacher is in eval mode and runs once per batch. The feature loss of a named module is ||s - t||^2 / ||t||^2 over
the batch of the step, where t are the teacher's features that the plan keeps. If that batch is divided into
micro-batches, the teacher runs twice, first to know ||t||^2.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import _pytree as pytree

from compress.data import AccumulatedBatch, batch_size_of, batches_of_step, num_batches
from compress.recipe import Finetune
from compress.storage import TrainingState, extra_states, load_tensors_, set_extra_states_, state_tensors
from compress.surgery import Plan

from .classification import SoftBatch
from .distillation_losses import STUDENT, TEACHER, FeatureDistillation
from .engine import Engine
from .lr_schedule import lr_factor, set_lr_
from .optimizers import clip_gradients_, make_optimizer
from .recalibrate import recalibrate_
from .run_state import ResumePoint
from .task import Task

if TYPE_CHECKING:
    from timm.data.mixup import Mixup


@dataclass
class FineTuneJob:
    """A fine-tuning to do: train the student in place for `total` steps, and leave its weights on the device.

    A task with its own loop gets it as the argument of `Task.finetune`.
    """

    student: nn.Module
    teacher: nn.Module
    plan: Plan
    config: Finetune
    engine: Engine  # its device, seed, history and display
    total: int  # steps
    folder: Path | None = None  # for checkpoints of a task's own loop; continue from them if there are any


class FineTuner:
    """Fine-tune a network: `step` trains on a batch, `evaluate` validates and remembers the best weights."""

    def __init__(self, job: FineTuneJob, task: Task) -> None:
        self.job, self.task, self.config, self.engine = job, task, job.config, job.engine
        self.student, self.teacher, self.done = job.student, job.teacher, 0
        self.best_weights: dict[str, Tensor] = {}
        self.optimizer = make_optimizer(self.config, self.student.parameters())
        self.weights = [p for p in self.student.parameters() if p.requires_grad]
        self.keep_best = bool(self.task.val is not None and self.config.best is not False)
        self.ema: AveragedModel | None = None
        if self.config.ema is not None:
            decay = get_ema_multi_avg_fn(self.config.ema)  # type: ignore[no-untyped-call]
            self.ema = AveragedModel(self.student, multi_avg_fn=decay, use_buffers=True)
        if self.keep_best:
            self.best_weights = {name: t.detach().clone() for name, t in state_tensors(self.evaluated_model).items()}
        modules = {"student": self.student} | ({"average": self.ema} if self.ema else {})
        self.state = TrainingState(modules, [self.optimizer], lambda: self.best_weights, {"best": None, "at": 0})
        self.has_extra_state = bool(extra_states(self.student))
        names = self.config.distill.features if self.config.distill is not None else ()
        self.features = FeatureDistillation(self.student, self.teacher, job.plan, names)
        self._taught: tuple[Any, Any] | None = None  # a micro-batch of this step, and the teacher's outputs on it
        self.mixup: Mixup | None = None

    @property
    def evaluated_model(self) -> nn.Module:
        """Return the network that is validated and kept: the student, or its moving average."""
        if self.ema is None:
            return self.student
        return self.ema.module

    def step(self, batch: Any) -> dict[str, Tensor]:
        """Train on a batch; return the loss and its terms."""
        config, weights = self.config, self.weights
        set_lr_(self.optimizer, lr_factor(config, self.done, self.job.total))
        self.done += 1
        if self.features.names and not self.features.kept:
            first_batch = batches_of_step(batch)[0]
            self.features.match(lambda model: self.task.forward(model, pytree.tree_map(_clone, first_batch)))
        if config.mixup or config.cutmix or config.label_smoothing:
            softened = [self._soften(one) for one in batches_of_step(batch)]
            batch = AccumulatedBatch(softened) if len(softened) > 1 else softened[0]
        if self.features.names:
            self._measure_teacher(batch)
        counts = {"task": self.task.count_targets, "distil": self._count_samples, "features": None}
        result = self.engine.gradient_computer.gradients(self.loss_terms, batch, weights, counts=counts)
        self._taught = None
        for weight, gradient, unused in zip(weights, result.gradients, result.unused, strict=True):
            weight.grad = None if unused else gradient
        clip_gradients_(config, self.student)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update_parameters(self.student)
            if self.has_extra_state:  # which has no average
                set_extra_states_(self.ema.module, copy.deepcopy(extra_states(self.student)))
        return {"loss": result.loss, **result.terms}

    def loss_terms(self, batch: Any) -> dict[str, Tensor]:
        """Return the terms of the loss of a micro-batch."""
        config, task = self.config, self.task
        teacher = self._teach(batch) if config.distill is not None else None
        with self.features.recording({STUDENT: self.student}):
            outputs = task.forward(self.student, batch)
        terms = {"task": task.loss(outputs, batch).reshape(())}
        if config.distill is not None:
            terms["distil"] = config.distill.weight * task.distil(outputs, teacher, config.distill.temperature)
            if config.distill.features:
                terms["features"] = config.distill.feature_weight * self.features.loss()
        return terms

    def _teach(self, batch: Any) -> Any:
        """Return the outputs of the teacher on a micro-batch, and record its features."""
        if self._taught is not None and self._taught[0] is batch:
            return self._taught[1]
        with self.features.recording({TEACHER: self.teacher}), torch.inference_mode():
            outputs = self.task.teach(self.teacher, pytree.tree_map(_clone, batch))  # some models change their input
        return pytree.tree_map(_clone, outputs)  # tensors of inference mode cannot be saved for backward

    def _measure_teacher(self, batch: Any) -> None:
        """Sum up the teacher's features in the step; if it has one micro-batch, the teacher need not run again."""
        self._taught = None

        def measure(micro_batch: Any) -> tuple[Any, Any, dict[str, Tensor]]:
            outputs = self._teach(micro_batch)
            return micro_batch, outputs, self.features.squared_norms()

        parts = self.engine.gradient_computer.run_micro_batches(measure, batch)
        self.features.set_totals([norms for _, _, norms in parts])
        self._taught = parts[0][:2] if len(parts) == 1 else None

    def evaluate(self) -> dict[str, float]:
        """Validate, and keep a copy of the weights if the first metric is the best so far."""
        metrics = self.engine.evaluate(self.task, self.evaluated_model, "validate")
        metric = next(iter(metrics.values()), math.nan)
        best = self.state.values["best"]
        if self.keep_best and math.isfinite(metric) and (best is None or metric >= best):
            self.state.values |= {"best": metric, "at": self.done}
            for name, tensor in state_tensors(self.evaluated_model).items():
                self.best_weights[name].copy_(tensor)
            if self.has_extra_state:
                self.state.extra_states.update(copy.deepcopy(extra_states(self.evaluated_model)))
        return metrics

    @torch.no_grad()
    def load_best_weights_(self) -> None:
        """Give the student the best weights, or the last if none were kept."""
        has_best = self.keep_best and self.state.values["best"] is not None
        load_tensors_(self.student, self.best_weights if has_best else state_tensors(self.evaluated_model))
        if has_best and self.has_extra_state:
            set_extra_states_(self.student, self.state.extra_states)
        if has_best:
            self.engine.run_state.kept_step = {"step": self.state.values["at"], "of": self.job.total}

    def _count_samples(self, batch: Any) -> float | None:
        """Return the number of samples that distillation is the mean over."""
        return self.task.count_targets(batch) if isinstance(batch, SoftBatch) else batch_size_of(batch)

    def _soften(self, batch: Any) -> Any:
        config, classes = self.config, self.task.classes
        if self.mixup is None and (config.mixup or config.cutmix):
            from timm.data.mixup import Mixup

            self.mixup = Mixup(  # type: ignore[no-untyped-call]
                config.mixup, config.cutmix, label_smoothing=config.label_smoothing, num_classes=classes
            )
        return self.task.soften(batch, classes, config.label_smoothing, self.mixup)


def fine_tune(job: FineTuneJob, task: Task, loader: Iterable[Any], resume: ResumePoint | None = None) -> None:
    """Train the student of a job in place, starting from its weights; keep the best on validation, or the last.

    Args:
        loader: training batches of this process.
        resume: checkpoint of this fine-tuning to continue from.

    Raises:
        Diverged: the loss is not finite.
    """
    if job.config.recalibrate and resume is None:
        recalibrate_(job.student, task, loader, job.config.recalibrate, job.engine)
    job.student.train()
    tuner = FineTuner(job, task)
    position = None
    if resume is not None and resume.metadata.position is not None:
        tuner.state.restore_(resume.tensors, resume.metadata.training)
        position, tuner.done = resume.metadata.position, resume.metadata.position.done
    size = num_batches(loader)
    job.engine.train(
        "finetune",
        loader,
        job.total,
        tuner.step,
        tuner.state,
        resume_at=position,
        measure_every=min(size, max(1, job.total // 2)) if size else max(1, job.total // 10),
        measure=tuner.evaluate if task.val is not None else None,
    )
    tuner.load_best_weights_()
    job.student.eval()


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
