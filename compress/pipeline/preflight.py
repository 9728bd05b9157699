"""Checks before a run: all problems that can be found early, reported together."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.data import loader_problems, loaders, num_batches, peek_first_batch, test_loader
from compress.errors import BatchError, NotReady, format_error
from compress.graph import Groups
from compress.modules import (
    as_call_inputs,
    clone_tensors,
    guarded_parameters,
    is_hugging_face_model,
    module_mode,
    shared_copy,
    trainable_copy,
)
from compress.recipe import DataKind, Finetune, Recipe, Target, complete_recipe
from compress.storage import extra_state_problems
from compress.surgery import Plan
from compress.training import (
    Classification,
    Engine,
    FineTuneJob,
    FineTuner,
    Task,
    TaskLike,
    Unlabelled,
    as_batches,
    as_task,
    check_metrics,
    has_labels,
    launch_problems,
    load_task,
    logits_of,
    tracker_problems,
)

from .calibration import CalibrationData
from .scratch_checks import scratch_problems
from .teacher import teacher_settings_problems, try_teacher, try_teacher_on_inputs

TIMED_STEPS, TIMED_SECONDS = 3, 1.0  # trial steps for a forecast: fewer if they take that long


@dataclass(frozen=True)
class UserInputs:
    """Data, task and example inputs as the user gave them."""

    train: Iterable[Any] | None = None
    val: Iterable[Any] | None = None
    task: TaskLike | None = None
    example_inputs: Any = None
    teacher: nn.Module | None = None  # unwrapped; None: the model itself
    calibration: Any = None
    test: Iterable[Any] | None = None
    brings_batches: bool = False  # the user's own loop feeds the search


@dataclass(frozen=True)
class CheckedInputs:
    """Task, training data and example inputs that fit the model and the recipe."""

    recipe: Recipe  # completed
    data: DataKind
    task: Task
    train: Iterable[Any] | None
    example_inputs: Any
    calibration: CalibrationData
    test: Iterable[Any] | None  # read at the end only
    step_seconds: float | None  # of one training step, if the recipe leaves its lengths to us


def check_inputs(
    model: nn.Module, teacher: nn.Module | None, recipe: Recipe, engine: Engine, inputs: UserInputs
) -> CheckedInputs:
    """Find the task and the example inputs, and try the first batch.

    Args:
        model: the dense model on the device of the run.
        teacher: a teacher that is not the model, on the same device.

    Raises:
        NotReady: something is missing or does not fit; the message lists all problems.
    """
    problems: list[str] = []
    if engine.store is not None:
        problems += extra_state_problems(model)
    problems += tracker_problems(recipe, engine.store.path.parent if engine.store is not None else None)
    try:
        task = _find_task(recipe, inputs)
    except (TypeError, ValueError, OSError) as error:
        raise NotReady(format_error(error)) from error
    first_batch, train, batch_problems = None, task.train, list[str]()
    if train is not None:
        try:
            first_batch, train = peek_first_batch(train, "train")
        except BatchError as error:
            batch_problems = [str(error)]
    if inputs.task is None and recipe.task is None and first_batch is not None:
        task = _task_of_hugging_face(model, task, train, first_batch)
    if type(task) is Classification and first_batch is not None and not has_labels(first_batch):
        task = Unlabelled(train, task.val, teacher if teacher is not None else model)
    data: DataKind = "inputs" if isinstance(task, Unlabelled) else "labels"
    data = "none" if train is None and not inputs.brings_batches else data
    is_automatic = recipe.is_automatic
    recipe = complete_recipe(
        recipe,
        data,
        prefers_adamw=prefers_adamw(model),
        distill_weight=task.distill_weight,
        trains=not task.has_own_fine_tuning,
        has_teacher=teacher is not None,
        batches=num_batches(train),
    )
    problems += launch_problems(engine, model, recipe.finetune, task)
    problems += _data_problems(recipe, task, inputs.brings_batches)
    problems += task.objections(recipe)
    if data == "inputs" and teacher is None and recipe.target.operations and recipe.search.length is not None:
        problems.append(
            "target.operations: the training data have no labels, and the model with all candidates cannot teach. Give "
            "batches of (input, target), or teacher=TRAINED_NETWORK"
        )
    if recipe.finetune is not None:
        problems += _finetune_problems(model, recipe.finetune, task)
        problems += scratch_problems(model, recipe, recipe.finetune)
    teacher_problems = [] if teacher is None else teacher_settings_problems(teacher, model, recipe)
    problems += teacher_problems
    step_seconds = None
    if first_batch is not None:
        batch = engine.move(first_batch)
        batch_problems = _try_evaluation(model, task, batch)
        if teacher is not None and not (batch_problems or teacher_problems):
            batch_problems = try_teacher(teacher, model, recipe, task, batch)
        if not (batch_problems or teacher_problems):
            trial = TrainingTrial(model, teacher, recipe, task, first_batch, engine)
            batch_problems = trial.problems()
            step_seconds = trial.step_seconds() if is_automatic and not batch_problems else None
    problems += batch_problems
    test = _find_test(recipe, inputs)
    problems += _test_problems(model, task, test, engine)
    calibration = CalibrationData(inputs.calibration, train, task, engine)
    problems += calibration.problems(model, recipe)
    example_inputs = inputs.example_inputs
    if example_inputs is None and inputs.calibration is not None and not problems:
        example_inputs = calibration.first()
    if example_inputs is None and first_batch is not None and not problems:
        example_inputs = task.inputs(first_batch)
    if example_inputs is None and task.train is None and not problems:
        problems.append(
            "example_inputs: expected the arguments of the model, because there is no training data to take them from: "
            "compress.prune(model, recipe, example_inputs=torch.randn(1, 3, 224, 224))"
        )
    if teacher is not None and first_batch is None and not problems:
        problems += try_teacher_on_inputs(teacher, model, task, engine.move(example_inputs))
    if problems:
        raise NotReady(problems[0] if len(problems) == 1 else f"{len(problems)} problems\n  " + "\n  ".join(problems))
    as_call_inputs(example_inputs)
    example_inputs = engine.move(example_inputs)
    if first_batch is None:
        _find_written_parameters(model, example_inputs)
    return CheckedInputs(recipe, data, task, train, example_inputs, calibration, test, step_seconds)


def check_groups(groups: Groups, target: Target) -> None:
    """Check that the model has dimensions of the kinds that the recipe targets.

    Raises:
        NotReady: the target is attention or selection and the model has none, or there is nothing to cut.
    """
    kinds = {group.kind for group in [*groups, *groups.refused]}
    if not kinds and not int(groups.cost.macs(groups.cost.widths)):
        raise NotReady("model: the model has no linear layer or convolution, so there is nothing to cut")
    if target.attention and target.attention != "auto" and not kinds & {"attention", "heads"}:
        raise NotReady(
            "target.attention: no attention was found in the model; it has "
            f"{' and '.join(sorted(kinds)) or 'nothing to cut'}. Leave attention out, or choose a model with attention"
        )
    if target.selection and "selection" not in kinds:
        raise NotReady(
            "target.selection: expected batch norms that read a residual stream, or features that other layers read "
            "too (pre-activation networks, DenseNet); the model has none. Leave selection out"
        )


def _find_task(recipe: Recipe, inputs: UserInputs) -> Task:
    has_loaders = inputs.train is not None or inputs.val is not None
    if inputs.task is not None:
        if has_loaders:
            raise ValueError("task: a task has its own data; give either task or train and val, not both")
        return as_task(inputs.task)
    train = inputs.train
    if train is None and recipe.is_automatic and not (recipe.task or recipe.data.source):
        train = inputs.calibration
    if has_loaders or train is not None:
        return Classification(as_batches(train), as_batches(inputs.val))
    if recipe.task is not None:
        return load_task(recipe.task)
    if recipe.data.source is not None:
        return Classification(*loaders(recipe.data))
    return Classification()


def _task_of_hugging_face(model: nn.Module, task: Task, train: Iterable[Any] | None, batch: Any) -> Task:
    """Return the task of a Hugging Face model if its batches are dicts; else, or without labels of images, the task."""
    if not isinstance(batch, Mapping) or not is_hugging_face_model(model):
        return task
    from compress.hf import task as task_of_model

    model_task = task_of_model(model, train, task.val)
    has_labels = any("label" in str(name) for name in batch)
    return model_task if has_labels or type(model_task) is not Classification else task


def _find_test(recipe: Recipe, inputs: UserInputs) -> Iterable[Any] | None:
    """Return the user's test data, or those that the data source of the recipe has besides validation data."""
    brings_data = inputs.task is not None or inputs.train is not None or inputs.val is not None
    if inputs.test is None and not brings_data and recipe.task is None:
        return test_loader(recipe.data)
    test: Iterable[Any] | None = as_batches(inputs.test)
    return test


def _data_problems(recipe: Recipe, task: Task, brings_batches: bool) -> list[str]:
    """Return the problems of training and validation data."""
    problems = []
    trainings = [f"search {recipe.search.method}"] * (recipe.search.length is not None)
    trainings += ["finetune"] * (recipe.finetune is not None)
    if trainings and task.train is None and not brings_batches:
        problems.append(
            f"train: {' and '.join(trainings)} need{'s' * (len(trainings) == 1)} training data, and there is none. "
            "Give train=LOADER (and val=LOADER), task=TASK, or name a task or data.source in the recipe"
        )
    if recipe.export is not None and recipe.export.int8 and task.train is None:
        problems.append("train: export.int8 measures ranges on training data, and there is none. Give train=LOADER")
    if task.val is not None:
        problems += loader_problems(task.val, "val")
    if isinstance(task.val, Iterator):
        problems.append("val: expected a loader that can be read more than once; got an iterator. Give list(val)")
    if num_batches(task.val) == 0:
        problems.append("val: expected at least one batch; the loader gave none")
    return problems


def _finetune_problems(model: nn.Module, config: Finetune, task: Task) -> list[str]:
    """Return the settings of fine-tuning that the task or the model does not support."""
    problems = []
    if config.best and task.val is None:
        problems.append(
            "val: finetune.best needs validation data, and there is none. Give val=LOADER, or leave best out"
        )
    soft_targets = [name for name in ("mixup", "cutmix", "label_smoothing") if getattr(config, name)]
    if soft_targets and not task.can_soften:
        problems.append(
            f"finetune.{soft_targets[0]}: needs soft targets, and {task.type_name} has no method `soften` to make them"
        )
    module_names = dict(model.named_modules())
    for name in config.distill.features if config.distill else ():
        if name not in module_names:
            nearest = difflib.get_close_matches(name, module_names, n=3)
            hint = f"; the nearest are {', '.join(nearest)}" if nearest else ""
            problems.append(f"finetune.distill.features: the model has no module {name!r}{hint}")
    return problems


def _try_evaluation(model: nn.Module, task: Task, batch: Any) -> list[str]:
    """Run model and loss on the first batch as in evaluation; return the problems."""
    with module_mode(model, training=False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            with guarded_parameters(model):
                outputs = task.forward(model, batch)
            loss = task.loss(outputs, batch)
        except BatchError as error:
            return [str(error)]
        except Exception as error:
            no_labels = ". It has no labels, so it was taken as inputs alone; expected batches of (input, target)"
            return [
                f"the model does not run on the first training batch: {format_error(error)}"
                + (no_labels if isinstance(task, Unlabelled) else "")
            ]
        if isinstance(task, Classification):
            task.classes = logits_of(outputs).shape[-1]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return [f"task.loss: expected a tensor with one number; got {type(loss).__name__}"]
    if not bool(torch.isfinite(loss)):
        return [f"the loss of the first training batch is {float(loss)}: look for NaN in data, weights and targets"]
    return []


def _test_problems(model: nn.Module, task: Task, test: Iterable[Any] | None, engine: Engine) -> list[str]:
    """Evaluate the model on the first batch of the test data; return the problems."""
    if test is None:
        return []
    if not task.can_test:
        return [f"test: {task.type_name} evaluates on its own validation data only; leave test out"]
    for name, loader in (("train", task.train), ("val", task.val)):
        if test is loader:
            return [f"test: expected data that choose nothing; got the loader that is {name}. Give other data"]
    if isinstance(test, Iterator):
        return ["test: expected a loader that can be read more than once; got an iterator. Give list(test)"]
    try:
        batch = engine.move(peek_first_batch(test, "test")[0])
    except BatchError as error:
        return [str(error)]
    with module_mode(model, training=False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            with guarded_parameters(model):
                check_metrics(task.evaluate(model, iter([batch])), task)
        except Exception as error:  # of any type: the user's own code fails
            return [f"test: the first batch cannot be evaluated: {format_error(error)}"]
    return []


def _find_written_parameters(model: nn.Module, example_inputs: Any) -> None:
    """Run the model once, to know the parameters that its code writes to; `find_groups` explains why it fails."""
    args, kwargs = clone_tensors(as_call_inputs(example_inputs))
    with (
        suppress(Exception),
        guarded_parameters(model),
        module_mode(model, training=False),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
    ):
        model(*args, **kwargs)


@dataclass
class TrainingTrial:
    """One training step on a copy of the model; its problems would otherwise appear after the search."""

    model: nn.Module
    teacher: nn.Module | None
    recipe: Recipe
    task: Task
    first_batch: Any
    engine: Engine

    def problems(self) -> list[str]:
        """Make the step and return its problems."""
        finetune = self.recipe.finetune
        if self.recipe.search.length is None and finetune is None:
            return []
        stage = "training" if finetune is None else "finetune"
        try:
            self._step()
        except Exception as error:
            is_complete = isinstance(error, ValueError) and format_error(error) == str(error)
            if is_complete:
                return [str(error)]
            is_single_sample = "more than 1 value per channel" in str(error)
            hint = ". Does the batch have only one image? Give the loader drop_last=True" if is_single_sample else ""
            return [f"{stage} does not run on the first batch: {format_error(error)}{hint}"]
        return []

    def step_seconds(self) -> float:
        """Return the time of a further step: the shortest of a few, because the first ones may be disturbed."""
        times: list[float] = []
        while len(times) < TIMED_STEPS and sum(times) < TIMED_SECONDS:
            start = time.perf_counter()
            self._step()
            times.append(time.perf_counter() - start)
        return min(times)

    def _step(self) -> None:
        trial_model, finetune, task = trainable_copy(self.model), self.recipe.finetune, self.task
        trial_model.train()
        batch = self.engine.move(self.first_batch)
        if finetune is not None and not task.has_own_fine_tuning:
            # A shared copy has the parameters for itself that its code writes to.
            teacher = shared_copy(self.model) if self.teacher is None else self.teacher
            job = FineTuneJob(trial_model, teacher, Plan({}, {}), finetune, self.engine, 1)
            with self.engine.gradient_computer.training():
                float(FineTuner(job, task).step(batch)["loss"])
        elif finetune is not None or getattr(self.recipe.search, "lr", None) is not None:
            if not any(p.requires_grad for p in trial_model.parameters()):
                raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
            task.loss(task.forward(trial_model, batch), batch).backward()  # type: ignore[no-untyped-call]


def prefers_adamw(model: nn.Module) -> bool:
    """Return whether a network has more layer norms than batch norms, as transformers have."""
    kinds = [type(module) for module in model.modules()]
    layer_norms = sum(issubclass(kind, nn.LayerNorm) for kind in kinds)
    return layer_norms > sum(issubclass(kind, nn.modules.batchnorm._BatchNorm) for kind in kinds)
