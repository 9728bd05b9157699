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

from compress.data import AccumulatedBatch, batch_size_of, batches_of_step, num_batches
from compress.modules import SearchSpace, clone_tensors
from compress.recipe import Finetune
from compress.storage import extra_states, load_tensors_, set_extra_states_, state_tensors
from compress.surgery import Plan

from .cutout import cutout
from .distillation_losses import STUDENT, TEACHER, FeatureDistillation
from .engine import Engine
from .lr_schedule import lr_factor, set_lr_
from .parallel.launch import make_student, make_teacher, teacher_in_main_memory
from .recalibrate import recalibrate_
from .run_state import ResumePoint
from .task import Task
from .tasks.classification import SoftBatch

if TYPE_CHECKING:
    from timm.data.mixup import Mixup

FEWEST_STEPS = 20  # between two validations, which would take longer than an epoch of a hundred images


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
        self.done = 0
        self.best_weights: dict[str, Tensor] = {}
        self.student = make_student(job.student, self.config, self.engine.device)
        self.teacher = make_teacher(job.teacher, self.engine.config, self.engine.device)
        self.keep_best = bool(self.task.val is not None and self.config.best is not False)
        self.ema: AveragedModel | None = None
        if self.config.ema is not None:
            decay = get_ema_multi_avg_fn(self.config.ema)  # type: ignore[no-untyped-call]
            self.ema = AveragedModel(job.student, multi_avg_fn=decay, use_buffers=True)
        if self.keep_best:
            self.best_weights = self.student.copy_of_weights()
        further: dict[str, nn.Module] = {"average": self.ema} if self.ema else {}
        values: dict[str, Any] = {"best": None, "at": 0}
        self.state = self.student.training_state(further, lambda: self.best_weights, values)
        self.has_extra_state = bool(extra_states(job.student))
        names = self.config.distill.features if self.config.distill is not None else ()
        self.features = FeatureDistillation(self.student.modules, self.teacher, job.plan, names)
        self._taught: tuple[Any, Any] | None = None  # a micro-batch of this step, and the teacher's outputs on it
        self.mixup: Mixup | None = None

    @property
    def evaluated_model(self) -> nn.Module:
        """Return the network that is validated and kept: the student, or its moving average."""
        if self.ema is None:
            return self.job.student
        return self.ema.module

    def step(self, batch: Any) -> dict[str, Tensor]:
        """Train on a batch; return the loss and its terms."""
        config, student = self.config, self.student
        set_lr_(student.optimizer, lr_factor(config, self.done, self.job.total))
        self.done += 1
        if self.features.names and not self.features.kept:
            first_batch = batches_of_step(batch)[0]
            self.features.match(lambda model: self.task.forward(model, clone_tensors(first_batch)))
        if config.drop_path and isinstance(self.job.student, SearchSpace):
            self.job.student.set_drop_path_(config.drop_path * (self.done - 1) / self.job.total)
        if config.cutout:
            parts = [cutout(one, config.cutout) for one in batches_of_step(batch)]
            batch = AccumulatedBatch(parts) if len(parts) > 1 else parts[0]
        if config.mixup or config.cutmix or config.label_smoothing:
            softened = [self._soften(one) for one in batches_of_step(batch)]
            batch = AccumulatedBatch(softened) if len(softened) > 1 else softened[0]
        if self.features.names:
            self._measure_teacher(batch)
        counts = {
            "task": self.task.count_targets,
            "auxiliary": self.task.count_targets,
            "distil": self._count_samples,
            "features": None,
        }
        compute = self.engine.gradient_computer
        result = compute.gradients(self.loss_terms, batch, student.weights, counts=counts, reduction=student.reduction)
        self._taught = None
        student.step(result)
        if self.ema is not None:
            self.ema.update_parameters(self.job.student)
            if self.has_extra_state:  # which has no average
                set_extra_states_(self.ema.module, copy.deepcopy(extra_states(self.job.student)))
        return {"loss": result.loss, **result.terms}

    def loss_terms(self, batch: Any) -> dict[str, Tensor]:
        """Return the terms of the loss of a micro-batch."""
        config, task = self.config, self.task
        teacher = self._teach(batch) if config.distill is not None else None
        with self.features.recording({STUDENT: self.student.modules}):
            outputs = task.forward(self.student.model, batch)
        terms = {"task": task.loss(outputs, batch).reshape(())}
        if config.auxiliary and isinstance(self.job.student, SearchSpace):
            auxiliary = self.job.student.auxiliary_outputs
            if auxiliary is not None:
                terms["auxiliary"] = config.auxiliary * task.loss(auxiliary, batch).reshape(())
        if config.distill is not None:
            terms["distil"] = config.distill.weight * task.distil(outputs, teacher, config.distill.temperature)
            if config.distill.features:
                terms["features"] = config.distill.feature_weight * self.features.loss()
        return terms

    def _teach(self, batch: Any) -> Any:
        """Return the outputs of the teacher on a micro-batch, and record its features."""
        if self._taught is not None and self._taught[0] is batch:
            return self._taught[1]
        # FSDP keeps the tensors that it gathers, which must not be those of inference mode.
        context = torch.inference_mode() if self.teacher is self.job.teacher else torch.no_grad()
        with self.features.recording({TEACHER: self.teacher}), context:
            outputs = self.task.teach(self.teacher, clone_tensors(batch))  # some models change their input
        return clone_tensors(outputs)  # tensors of inference mode cannot be saved for backward

    def _measure_teacher(self, batch: Any) -> None:
        """Sum up the teacher's features in the step; if it has one micro-batch, the teacher need not run again."""
        self._taught = None

        def measure(micro_batch: Any) -> tuple[Any, Any, dict[str, Tensor]]:
            outputs = self._teach(micro_batch)
            return micro_batch, outputs, self.features.squared_norms()

        parts = self.engine.gradient_computer.run_micro_batches(measure, batch)
        self.features.set_totals([norms for _, _, norms in parts])
        self._taught = parts[0][:2] if len(parts) == 1 else None

    def remember_start(self, metrics: dict[str, float]) -> None:
        """Keep the weights before the first step unless later ones are as good; `metrics` were measured with them."""
        metric = next(iter(metrics.values()), math.nan)
        if self.keep_best and math.isfinite(metric):
            self.state.values["best"] = metric
            if self.has_extra_state:
                self.state.extra_states.update(copy.deepcopy(extra_states(self.evaluated_model)))

    def evaluate(self) -> dict[str, float]:
        """Validate, and keep a copy of the weights if the first metric is the best so far."""
        with self.student.whole():
            metrics = self.engine.evaluate(self.task, self.evaluated_model, "validate")
            metric = next(iter(metrics.values()), math.nan)
            best = self.state.values["best"]
            if self.keep_best and math.isfinite(metric) and (best is None or metric >= best):
                self.state.values |= {"best": metric, "at": self.done}
                weights = state_tensors(self.evaluated_model)
                for name, kept in self.best_weights.items():
                    kept.copy_(weights[name])
                if self.has_extra_state:
                    self.state.extra_states.update(copy.deepcopy(extra_states(self.evaluated_model)))
        return metrics

    @torch.no_grad()
    def load_best_weights_(self) -> None:
        """Give the student the best weights, or the last if none were kept; with several processes, that of rank 0."""
        student = self.job.student
        self.student.finish_()
        has_best = self.keep_best and self.state.values["best"] is not None
        if not has_best:
            load_tensors_(student, state_tensors(self.evaluated_model))
        elif self.best_weights:  # that of a sharded student is on rank 0 only
            load_tensors_(student, self.best_weights)
        if has_best and self.has_extra_state:
            set_extra_states_(student, self.state.extra_states)
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


def steps_between_validations(epoch: int | None, total: int) -> int:
    """Return after how many steps a network is validated: every epoch, or several where epochs are short.

    Args:
        epoch: steps per epoch; None if the loader has no length, then ten times in all.
        total: steps of the training.

    >>> [steps_between_validations(epoch, 400) for epoch in (2, 15, 75, 300, None)]
    [20, 30, 75, 200, 40]
    """
    if not epoch:
        return max(1, total // 10)
    fewest = min(FEWEST_STEPS, -(-total // FEWEST_STEPS))  # short trainings are validated every epoch, too
    return min(epoch * -(-fewest // epoch), max(1, total // 2))


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
    space = job.student if isinstance(job.student, SearchSpace) else None
    if job.config.auxiliary and space is not None:
        space.add_auxiliary_head_()
    job.student.train()
    tuner = FineTuner(job, task)
    position = None
    if resume is not None and resume.metadata.position is not None:
        tuner.state.restore_(resume.tensors, resume.metadata.training)
        position, tuner.done = resume.metadata.position, resume.metadata.position.done
    elif job.config.from_ == "search" and not job.config.recalibrate:
        tuner.remember_start(job.engine.run_state.sliced_metrics or {})
    with teacher_in_main_memory(job.teacher, job.engine.config):
        job.engine.train(
            "finetune",
            loader,
            job.total,
            tuner.step,
            tuner.state,
            resume_at=position,
            measure_every=steps_between_validations(num_batches(loader), job.total),
            measure=tuner.evaluate if task.val is not None else None,
        )
    tuner.load_best_weights_()
    if space is not None:
        space.set_drop_path_(0.0)
        space.remove_auxiliary_head_()
    job.student.eval()
