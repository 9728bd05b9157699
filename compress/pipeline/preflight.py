"""Checks before a run: all problems that can be found early, reported together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compress.data import loader_problems, loaders, num_batches, peek_first_batch
from compress.errors import BatchError, NotReady, format_error
from compress.graph import Groups
from compress.modules import as_call_inputs, guarded_parameters, module_mode, shared_copy, trainable_copy
from compress.recipe import Finetune, Recipe, Target
from compress.storage import extra_state_problems
from compress.surgery import Plan
from compress.training import (
    Classification,
    Engine,
    FineTuneJob,
    FineTuner,
    Task,
    TaskLike,
    as_task,
    launch_problems,
    load_task,
    logits_of,
    tracker_problems,
)


@dataclass(frozen=True)
class UserInputs:
    """Data, task and example inputs as the user gave them."""

    train: Iterable[Any] | None = None
    val: Iterable[Any] | None = None
    task: TaskLike | None = None
    example_inputs: Any = None
    brings_batches: bool = False  # the user's own loop feeds the search


@dataclass(frozen=True)
class CheckedInputs:
    """Task, training data and example inputs that fit the model and the recipe."""

    task: Task
    train: Iterable[Any] | None
    example_inputs: Any


def check_inputs(model: nn.Module, recipe: Recipe, engine: Engine, inputs: UserInputs) -> CheckedInputs:
    """Find the task and the example inputs, and try the first batch.

    Raises:
        NotReady: something is missing or does not fit; the message lists all problems.
    """
    problems = launch_problems(engine)
    if engine.store is not None:
        problems += extra_state_problems(model)
    problems += tracker_problems(recipe, engine.store.path.parent if engine.store is not None else None)
    try:
        task = _find_task(recipe, inputs)
    except (TypeError, ValueError, OSError) as error:
        raise NotReady(format_error(error)) from error
    problems += _data_problems(recipe, task, inputs.brings_batches)
    problems += task.objections(recipe)
    if recipe.finetune is not None:
        problems += _finetune_problems(model, recipe.finetune, task)
    first_batch, train = None, task.train
    if train is not None:
        try:
            first_batch, train = peek_first_batch(train, "train")
            problems += _try_evaluation(model, task, engine.move(first_batch)) or _try_training(
                model, recipe, task, first_batch, engine
            )
        except BatchError as error:
            problems.append(str(error))
    example_inputs = inputs.example_inputs
    if example_inputs is None and first_batch is not None and not problems:
        example_inputs = task.inputs(first_batch)
    if example_inputs is None and task.train is None and not problems:
        problems.append(
            "example_inputs: expected the arguments of the model, because there is no training data to take them from: "
            "compress.prune(model, recipe, example_inputs=torch.randn(1, 3, 224, 224))"
        )
    if problems:
        raise NotReady(problems[0] if len(problems) == 1 else f"{len(problems)} problems\n  " + "\n  ".join(problems))
    as_call_inputs(example_inputs)
    example_inputs = engine.move(example_inputs)
    if first_batch is None:
        _find_written_parameters(model, example_inputs)
    return CheckedInputs(task, train, example_inputs)


def check_groups(groups: Groups, target: Target) -> None:
    """Check that the model has dimensions of the kinds that the recipe targets.

    Raises:
        NotReady: the target is attention and the model has none, or there is nothing to cut.
    """
    kinds = {group.kind for group in [*groups, *groups.refused]}
    if not kinds and not int(groups.cost.macs(groups.cost.widths)):
        raise NotReady("model: the model has no linear layer or convolution, so there is nothing to cut")
    if target.attention and not kinds & {"attention", "heads"}:
        raise NotReady(
            "target.attention: no attention was found in the model; it has "
            f"{' and '.join(sorted(kinds)) or 'nothing to cut'}. Leave attention out, or choose a model with attention"
        )


def _find_task(recipe: Recipe, inputs: UserInputs) -> Task:
    has_loaders = inputs.train is not None or inputs.val is not None
    if inputs.task is not None:
        if has_loaders:
            raise ValueError("task: a task has its own data; give either task or train and val, not both")
        return as_task(inputs.task)
    if has_loaders:
        return Classification(inputs.train, inputs.val)
    if recipe.task is not None:
        return load_task(recipe.task)
    if recipe.data.source is not None:
        return Classification(*loaders(recipe.data))
    return Classification()


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
            return [f"the model does not run on the first training batch: {format_error(error)}"]
        if isinstance(task, Classification):
            task.classes = logits_of(outputs).shape[-1]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return [f"task.loss: expected a tensor with one number; got {type(loss).__name__}"]
    if not bool(torch.isfinite(loss)):
        return [f"the loss of the first training batch is {float(loss)}: look for NaN in data, weights and targets"]
    return []


def _find_written_parameters(model: nn.Module, example_inputs: Any) -> None:
    """Run the model once, to know the parameters that its code writes to; `find_groups` explains why it fails."""
    args, kwargs = pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, as_call_inputs(example_inputs))
    with (
        suppress(Exception),
        guarded_parameters(model),
        module_mode(model, training=False),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
    ):
        model(*args, **kwargs)


def _try_training(model: nn.Module, recipe: Recipe, task: Task, first_batch: Any, engine: Engine) -> list[str]:
    """Make one training step on a copy of the model; its problems would otherwise appear after the search."""
    if recipe.search.length is None and recipe.finetune is None:
        return []
    trial_model = trainable_copy(model)
    trial_model.train()
    batch, stage = engine.move(first_batch), "training" if recipe.finetune is None else "finetune"
    try:
        if recipe.finetune is not None and not task.has_own_fine_tuning:
            teacher = shared_copy(model)  # has the parameters for itself that its code writes to
            FineTuner(FineTuneJob(trial_model, teacher, Plan({}, {}), recipe.finetune, engine, 1), task).step(batch)
        elif recipe.finetune is not None or getattr(recipe.search, "lr", None) is not None:
            task.loss(task.forward(trial_model, batch), batch).backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        is_complete = isinstance(error, ValueError) and format_error(error) == str(error)
        if is_complete:
            return [str(error)]
        is_single_sample = "more than 1 value per channel" in str(error)
        hint = ". Does the batch have only one image? Give the loader drop_last=True" if is_single_sample else ""
        return [f"{stage} does not run on the first batch: {format_error(error)}{hint}"]
    return []
