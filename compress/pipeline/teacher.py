"""Checks of a teacher that is not the network being pruned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import format_error
from compress.modules import as_call_inputs, clone_tensors, guarded_parameters, module_mode
from compress.recipe import LogitDistillation, Recipe
from compress.storage import state_tensors
from compress.training import Classification, Task, logits_of


def teacher_settings_problems(teacher: nn.Module, dense: nn.Module, recipe: Recipe) -> list[str]:
    """Return the problems of a teacher that follow from the recipe: nobody learns from it, or features do not match."""
    if not _distillations(recipe):
        return [
            "teacher: no part of the recipe learns from a teacher; add finetune.distill or search.distill, or leave "
            "teacher out"
        ]
    if recipe.finetune is None or recipe.finetune.distill is None or not recipe.finetune.distill.features:
        return []
    shapes, expected = ({name: list(t.shape) for name, t in state_tensors(m).items()} for m in (teacher, dense))
    different = [name for name in {**expected, **shapes} if shapes.get(name) != expected.get(name)]
    if not different:
        return []
    name = different[0]
    return [
        "finetune.distill.features: the features of the pruned network are compared with those that the plan keeps of "
        f"the teacher, so the teacher needs the model's architecture; {name} has shape "
        f"{expected.get(name, 'none')} in the model and {shapes.get(name, 'none')} in the teacher. Leave features out, "
        "or give a teacher of the same architecture"
    ]


def try_teacher(teacher: nn.Module, dense: nn.Module, recipe: Recipe, task: Task, batch: Any) -> list[str]:
    """Run the teacher on the first batch and compare its outputs with the model's as distillation does."""
    if not (distillations := _distillations(recipe)):
        return []
    with module_mode(dense, training=False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            with guarded_parameters(teacher):
                taught = task.teach(teacher, clone_tensors(batch))
        except Exception as error:  # of any type: the teacher's own code fails
            return [f"teacher: does not run on the first training batch: {format_error(error)}"]
        try:
            outputs = task.forward(dense, clone_tensors(batch))
            loss = task.distil(outputs, taught, distillations[0].temperature)
        except Exception as error:
            return [f"teacher: its outputs cannot be compared with the model's: {format_error(error)}"]
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not bool(torch.isfinite(loss)):
        value = float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else type(loss).__name__
        return [f"teacher: expected a finite distance of its outputs from the model's; got {value}"]
    return []


def try_teacher_on_inputs(teacher: nn.Module, dense: nn.Module, task: Task, example_inputs: Any) -> list[str]:
    """Run the teacher on the example inputs, if there is no batch; compare the shapes of logits."""
    outputs = []
    for model in (teacher, dense):
        args, kwargs = clone_tensors(as_call_inputs(example_inputs))
        with module_mode(model, training=False), torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                with guarded_parameters(model):
                    outputs.append(model(*args, **kwargs))
            except Exception as error:
                if model is dense:
                    return []  # `find_groups` explains it
                return [f"teacher: does not run on the example inputs: {format_error(error)}"]
    if isinstance(task, Classification):
        shapes = [list(logits_of(output).shape) for output in outputs]
        if shapes[0] != shapes[1]:
            return [f"teacher: expected logits of shape {shapes[1]}, as the model's; got {shapes[0]}"]
    return []


def describe_teacher(teacher: nn.Module) -> str:
    """Return the note of the report about a teacher that is not the network being pruned."""
    return (
        f"the teacher was another network: {type(teacher).__name__}, "
        f"{sum(p.numel() for p in teacher.parameters()):,} parameters"
    )


def _distillations(recipe: Recipe) -> list[LogitDistillation]:
    """Return the distillation settings of search and fine-tuning."""
    sections = (recipe.search, recipe.finetune)
    settings = [getattr(section, "distill", None) for section in sections]
    return [distill for distill in settings if isinstance(distill, LogitDistillation)]
