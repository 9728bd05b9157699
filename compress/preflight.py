"""Everything that can be known to go wrong, found out before an hour is spent, and said at once."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from . import states, tracking
from .data import loaders
from .discover import as_call
from .engine import Engine
from .errors import said
from .finetune import Tuning
from .groups import Groups
from .loading import length_of, peek, unlike
from .plan import Plan
from .recipe import Recipe, Target
from .task import BatchError, Classification, Task, check_task, logits_of, task_from
from .tracing import mode
from .walk import modules_of, tensors_of


class NotReady(ValueError):
    """A run that cannot start; the message names everything that is in its way."""


def unwrapped(model: Any) -> nn.Module:
    """The model inside the wrappers of torch, which change its names: DataParallel, DDP, torch.compile.

    Raises:
        NotReady: it is not a model, or none that can be copied and cut.
    """
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    if not isinstance(model, nn.Module):
        raise NotReady(f"model: expected a torch.nn.Module; got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise NotReady("model: TorchScript cannot be cut; give the module of Python code that it was made from")
    for name, tensor in tensors_of(model).items():
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise NotReady(f"model: {name} has no shape yet (a lazy module); run the model on a batch once")
        if tensor.is_meta:
            raise NotReady(f"model: {name} is on the meta device and has no numbers; load the weights first")
    for name, module in modules_of(model).items():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                raise NotReady(
                    f"model: {name}.{key} is computed from other tensors, which neither copies nor cuts keep up. Make "
                    "it a parameter again: torch.nn.utils.prune.remove, torch.nn.utils.remove_weight_norm, or detach()"
                )
    return model


def check_groups(groups: Groups, target: Target) -> None:
    """
    Raises:
        NotReady: attention is to be cut, and the model has none; or there is nothing that could be.
    """
    kinds = {g.kind for g in [*groups, *groups.refused]}
    if not kinds and not int(groups.cost.macs(groups.cost.widths)):
        raise NotReady("model: there is nothing to cut: no layer was found that multiplies its inputs with parameters")
    if target.attention and not kinds & {"attention", "heads"}:
        raise NotReady(
            "target.attention: the model has no dimensions that pass through a product of activations; it has "
            f"{' and '.join(sorted(kinds)) or 'nothing to cut'}. Leave attention out, or choose a model with attention"
        )


@dataclass
class Ready:
    """What a run works with."""

    task: Task
    train: Iterable[Any] | None
    example_inputs: Any


def make_ready(
    model: nn.Module,
    recipe: Recipe,
    engine: Engine,
    *,
    train: Iterable[Any] | None = None,
    val: Iterable[Any] | None = None,
    task: Task | None = None,
    example_inputs: Any = None,
    fed: bool = False,
) -> Ready:
    """Find the task and the example inputs, and try the first batch. `fed`: somebody else will bring the batches.

    Raises:
        NotReady: all that is missing or does not fit.
    """
    wrong = states.objections(engine)
    wrong += tracking.objections(recipe, engine.store.path.parent if engine.store is not None else None)
    try:
        found = _task(recipe, train, val, task)
    except (TypeError, ValueError, OSError) as error:
        raise NotReady(said(error)) from error
    wrong += _missing(model, recipe, found, fed)
    first, loader = None, found.train
    if loader is not None:
        try:
            first, loader = peek(loader, "train")
            wrong += _try(model, found, engine.move(first)) or _try_training(model, recipe, found, first, engine)
        except BatchError as error:
            wrong.append(str(error))
    if example_inputs is None and first is not None and not wrong:
        example_inputs = found.inputs(first)
    if example_inputs is None and found.train is None and not wrong:
        wrong.append(
            "example_inputs: expected what the model is called with, as there is no training data to take it from: "
            "compress.prune(model, recipe, example_inputs=torch.randn(1, 3, 224, 224))"
        )
    if wrong:
        raise NotReady(wrong[0] if len(wrong) == 1 else f"{len(wrong)} things to mend\n  " + "\n  ".join(wrong))
    as_call(example_inputs)
    return Ready(found, loader, engine.move(example_inputs))


def _task(recipe: Recipe, train: Any, val: Any, task: Task | None) -> Task:
    if task is not None:
        if train is not None or val is not None:
            raise ValueError("task: a task brings its own data; give either task or train and val, not both")
        return check_task(task)
    if train is not None or val is not None:
        return Classification(train, val)
    if recipe.task is not None:
        return task_from(recipe.task)
    if recipe.data.source is not None:
        return Classification(*loaders(recipe.data))
    return Classification()


def _missing(model: nn.Module, recipe: Recipe, task: Task, fed: bool) -> list[str]:
    """What the recipe asks for and nobody brought."""
    wrong = []
    trains = [f"search {recipe.search.method}"] * (recipe.search.length is not None)
    trains += ["finetune"] * (recipe.finetune is not None)
    if trains and task.train is None and not fed:
        wrong.append(
            f"train: {' and '.join(trains)} need{'s' * (len(trains) == 1)} training data, and there is none. "
            "Give train=LOADER (and val=LOADER), task=TASK, or name a task or data.source in the recipe"
        )
    if recipe.export is not None and recipe.export.int8 and task.train is None:
        wrong.append("train: export.int8 measures ranges on training data, and there is none. Give train=LOADER")
    if task.val is not None:
        wrong += unlike(task.val, "val")
    if isinstance(task.val, Iterator):
        wrong.append("val: expected a loader that can be read more than once; got an iterator. Give list(val)")
    if length_of(task.val) == 0:
        wrong.append("val: expected at least one batch; the loader gave none")
    if hasattr(task, "objections"):
        wrong += task.objections(recipe)
    if recipe.finetune is None:
        return wrong
    config = recipe.finetune
    if config.best and task.val is None:
        wrong.append("val: finetune.best needs validation data, and there is none. Give val=LOADER, or leave best out")
    soft = [name for name in ("mixup", "cutmix", "label_smoothing") if getattr(config, name)]
    if soft and not hasattr(task, "soften"):
        wrong.append(f"finetune.{soft[0]}: {type(task).__name__} has no `soften`, which makes targets soft")
    names = dict(model.named_modules())
    for name in config.distill.features if config.distill else ():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            wrong.append(f"finetune.distill.features: the model has no module {name!r}{hint}")
    return wrong


def _try(model: nn.Module, task: Task, batch: Any) -> list[str]:
    """Run the first batch through model and loss, as evaluation would."""
    with mode(model, training=False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            outputs = task.forward(model, batch)
            loss = task.loss(outputs, batch)
        except BatchError as error:
            return [str(error)]
        except Exception as error:
            return [f"the model does not run on the first training batch: {said(error)}"]
        if isinstance(task, Classification):
            task.classes = logits_of(outputs).shape[-1]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return [f"task.loss: expected a tensor with one number; got {type(loss).__name__}"]
    if not bool(torch.isfinite(loss)):
        return [f"the loss of the first training batch is {float(loss)}: look for NaN in data, weights and targets"]
    return []


def _try_training(model: nn.Module, recipe: Recipe, task: Task, first: Any, engine: Engine) -> list[str]:
    """Make the first step of a training on a copy: what it stumbles over would be found after the search."""
    if recipe.search.length is None and recipe.finetune is None:
        return []
    twin = copy.deepcopy(model)
    twin.train()
    batch, stage = engine.move(first), "training" if recipe.finetune is None else "finetune"
    try:
        if recipe.finetune is not None and not hasattr(task, "finetune"):
            Tuning(twin, model, Plan({}, {}), task, recipe.finetune, engine, 1).step(batch)
        elif recipe.finetune is not None or getattr(recipe.search, "lr", None) is not None:
            task.loss(task.forward(twin, batch), batch).backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        hint = (
            ". A batch of one image? Give the loader drop_last=True"
            if "more than 1 value per channel" in str(error)
            else ""
        )
        known = isinstance(error, ValueError) and said(error) == str(error)
        return [str(error) if known else f"{stage} does not run on the first batch: {said(error)}{hint}"]
    return []
