"""Task: the data, the loss, the evaluation and the distillation loss of a model; tasks/ has those that we bring."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from compress.data import batch_size_of
from compress.formatting import describe_value
from compress.recipe import Recipe

REQUIRED = ("train", "val", "inputs", "forward", "loss", "evaluate", "distil")


@runtime_checkable
class TaskLike(Protocol):
    """The part of a task that everybody has to write; an object with these need not derive from `Task`."""

    train: Iterable[Any] | None
    val: Iterable[Any] | None

    def inputs(self, batch: Any) -> Any: ...

    def forward(self, model: nn.Module, batch: Any) -> Any: ...

    def loss(self, outputs: Any, batch: Any) -> Tensor: ...

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]: ...

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor: ...


class SampleLosses(NamedTuple):
    """Loss, entropy of the predicted distribution and verdict of each sample, as tensors (samples,)."""

    loss: Tensor
    entropy: Tensor
    right: Tensor  # bool: the prediction is the target
    counted: Tensor  # bool: the sample has a target


class _TaskType(type):
    """Make `isinstance(task, Task)` true for every object that has what `TaskLike` names."""

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or (cls is Task and isinstance(instance, TaskLike))


class Task(metaclass=_TaskType):
    """Base class of tasks: write `inputs`, `forward`, `loss`, `evaluate` and `distil`, and set `train` and `val`.

    `train` and `val` are loaders, or None. Batches are passed on as the loaders give them, on the model's device.
    The remaining methods are optional hooks with a default.
    """

    train: Iterable[Any] | None
    val: Iterable[Any] | None
    classes: Any  # number of classes; needed by tasks that define `soften`
    include: Sequence[str] = ()  # modules to prune if the recipe's `target.include` names none
    can_test: bool = True  # False: `evaluate` ignores the batches that it is given, and reads `val` itself
    sums_over_processes: bool = False  # True: `evaluate` sums over the processes, each of which gets its share of `val`
    distill_weight: float | None = None  # of distillation, if the recipe has none; None: no distillation by default

    def inputs(self, batch: Any) -> Any:
        """Return the arguments of the model: a tensor, a tuple, a dict by name, or a list of images."""
        raise NotImplementedError

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Run the model on a batch."""
        raise NotImplementedError

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """Return the loss of the outputs of `forward`."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Measure a model in eval mode; the first metric decides which weights are best, larger is better."""
        raise NotImplementedError

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        """Return the distance of the outputs from those of the dense model."""
        raise NotImplementedError

    def teach(self, model: nn.Module, batch: Any) -> Any:
        """Run the dense model for `distil`. Default: `forward`."""
        return self.forward(model, batch)

    def count_targets(self, batch: Any) -> float | None:
        """Return how many targets the mean in `loss` is over; None if unknown. Default: the number of samples.

        It weighs the losses of processes, accumulated batches and micro-batches, so that they are as one large batch.
        """
        return batch_size_of(batch)

    def reward(self, outputs: Any, batch: Any) -> Tensor:
        """Return how good the outputs of `forward` are, larger is better, as a mean like `loss`. Default: exp(-loss).

        The controller of the search `aps` maximizes it. It is called in training mode.
        """
        return torch.exp(-self.loss(outputs, batch))

    def sample_losses(self, outputs: Any, batch: Any) -> SampleLosses | None:
        """Return loss and entropy of each sample, and whether it is predicted right. Default: None, not known.

        A search shows them beside the costs of its scores. It is called in every step, without gradients.
        """
        return None

    def objections(self, recipe: Recipe) -> list[str]:
        """Return the settings of the recipe that this task does not support, one line each. Default: none."""
        return []

    def describe(self) -> dict[str, Any]:
        """Return the settings that change a run, as JSON data: a resumed run must have the same. Default: none."""
        return {}

    def save(self, folder: Path) -> None:
        """Write further files next to those of a saved result. Default: none."""

    def soften(self, batch: Any, classes: int, smoothing: float, mix: Any = None) -> Any:
        """Return the batch with soft targets, for label smoothing, mixup and cutmix."""
        raise NotImplementedError

    def draw(self, outputs: Any, batch: Any, temperature: float = 1.0) -> Tensor:
        """Return a random loss whose squared gradient has the curvature of the loss as its mean."""
        raise NotImplementedError

    def finetune(self, work: Any) -> None:
        """Train the compact network in your own loop; `work` is a `FineTuneJob`."""
        raise NotImplementedError

    def export(self, pair: tuple[nn.Module, nn.Module], *args: Any, **kwargs: Any) -> Any:
        """Export the second of (dense, compact) with your own exporter; return an `ExportReport`."""
        raise NotImplementedError

    @property
    def type_name(self) -> str:
        """Return the name of the user's class, for messages."""
        return type(self).__name__

    @property
    def can_soften(self) -> bool:
        """Return whether the task defines `soften`."""
        return _has(self, "soften")

    @property
    def can_draw(self) -> bool:
        """Return whether the task defines `draw`."""
        return _has(self, "draw")

    @property
    def has_own_fine_tuning(self) -> bool:
        """Return whether the task defines `finetune`."""
        return _has(self, "finetune")

    @property
    def has_own_export(self) -> bool:
        """Return whether the task defines `export`."""
        return _has(self, "export")


class _AdaptedTask(Task):
    """A user's task that does not derive from `Task`: its own methods, defaults for the hooks that it lacks."""

    HOOKS: tuple[str, ...] = ("include", "teach", "count_targets", "reward", "objections", "save", "soften", "draw")
    HOOKS += ("finetune", "export", "can_test", "sums_over_processes", "distill_weight", "sample_losses", "describe")

    def __init__(self, task: TaskLike) -> None:
        self._task = task
        for name in (*REQUIRED[2:], *self.HOOKS):
            if hasattr(task, name):
                setattr(self, name, getattr(task, name))

    def __getattr__(self, name: str) -> Any:  # train, val, classes: as the user's task has them at this moment
        if name == "_task":
            raise AttributeError(name)
        return getattr(self._task, name)

    @property
    def type_name(self) -> str:
        return type(self._task).__name__


def as_task(task: TaskLike, where: str = "task") -> Task:
    """Return a task with every hook: the object itself if it derives from `Task`, else an adapter of it.

    Raises:
        TypeError: a required attribute or method is missing.
    """
    if missing := [name for name in REQUIRED if not _has(task, name)]:
        raise TypeError(f"{where}: expected a compress.Task; {type(task).__name__} has no {', '.join(missing)}")
    derived = issubclass(type(task), Task)
    return task if isinstance(task, Task) and derived else _AdaptedTask(task)


def _has(task: object, name: str) -> bool:
    """Return whether a task has an attribute, or a method that is not the default of `Task`."""
    if not hasattr(task, name):
        return False
    value = getattr(task, name)
    return getattr(value, "__func__", value) is not vars(Task).get(name, Task)


def load_task(name: str) -> Task:
    """Return the task that `package.module:factory` creates.

    Raises:
        ValueError: there is no such factory.
        TypeError: the factory returns something that is not a task.
    """
    module, _, factory = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"task {name}: {error}. Expected package.module:factory, importable from here.") from error
    return as_task(make(), f"task {name}")


def check_metrics(metrics: Any, task: Task) -> dict[str, float]:
    """Return the metrics of `task.evaluate` as floats.

    Raises:
        TypeError: they are not a dict of numbers by name.
    """
    where = f"{task.type_name}.evaluate: expected a dict of numbers by name, such as {{'accuracy': 0.9}}; got"
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{where} {describe_value(metrics)}")
    for name, value in metrics.items():
        if not isinstance(name, str) or not callable(getattr(value, "__float__", None)):
            raise TypeError(f"{where} {name!r}: {describe_value(value)}")
    return {name: float(value) for name, value in metrics.items()}
