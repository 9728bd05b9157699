"""Task: what to train on, the loss, how to evaluate, how to distil. Classification is the default."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .processes import total

Pick = str | int | Callable[[Any], Any]
INPUTS = ("image", "images", "input", "inputs", "pixel_values", "img", "x", "data")
IGNORED = -100  # a target that cross entropy leaves out
TARGETS = ("label", "labels", "target", "targets", "y", "class")


@runtime_checkable
class Task(Protocol):
    """All that the library has to know about what a model is for.

    `train` and `val` are loaders, or None. Batches are handed over as the loaders give them, on the model's device.
    `evaluate` returns measurements by name; the first of them decides which weights are best, and larger is better.

    A task may have more, each by itself (compress/mmdet has them all):
        include                         modules that are cut if the recipe's `target.include` names none
        teach(model, batch)             what the dense model is asked for `distil`, instead of `forward`
        soften(batch, classes, ...)     the batch with soft targets, for label smoothing, mixup and cutmix
        draw(outputs, batch)            targets drawn from the predictions, for the curvature of the loss
        objections(recipe)              what it cannot do of the recipe, each in a line
        finetune(work)                  trains the compact network in a loop of its own (see finetune.Work)
        save(folder)                    more files beside those of a saved result
    """

    train: Iterable[Any] | None
    val: Iterable[Any] | None

    def inputs(self, batch: Any) -> Any:
        """What the model is called with: a tensor, a tuple of arguments, a dict of named ones, or a list of images."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Run the model."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """The loss of what `forward` returned."""

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Measure a model that is in eval mode."""

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        """How far the outputs are from those of the dense model."""


def teaching(task: Task) -> Callable[[nn.Module, Any], Any]:
    """How the dense model is asked: a task may have a `teach`, which does no more than `distil` needs."""
    asked: Callable[[nn.Module, Any], Any] = getattr(task, "teach", task.forward)
    return asked


class BatchError(ValueError):
    """A loader gives something else than the task expects."""


class Pair(NamedTuple):
    """A batch that the library made itself, with soft targets."""

    input: Tensor
    target: Tensor


def distillation(student: Tensor, teacher: Tensor, temperature: float = 4.0) -> Tensor:
    """Mean KL divergence of the student's softened predictions from the teacher's (Xue 2022, 4.2.1; as in TAS).

        1/N sum_n sum_i p_i log(p_i / q_i),  p = softmax(teacher / T),  q = softmax(student / T)

    >>> logits = torch.tensor([[1.0, 2.0, 3.0]])
    >>> float(distillation(logits, logits))
    0.0

    Raises:
        ValueError: the two have other shapes, or the temperature is not positive.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"distillation: expected logits of one shape; got {describe(student)} of the student and "
            f"{describe(teacher)} of the teacher. Run both on the same batch, with the same classes"
        )
    if not 0 < temperature < float("inf"):
        raise ValueError(f"distillation: expected a positive temperature, such as 4; got {temperature}")
    p, q = F.log_softmax(teacher / temperature, -1), F.log_softmax(student / temperature, -1)
    return F.kl_div(q.flatten(0, -2), p.flatten(0, -2), reduction="batchmean", log_target=True)


class Classification:
    """Images and their classes: cross entropy, accuracy, KL of the logits.

    `input` and `target` say where the two lie in a batch, as a key, a position or a function; by default the first two
    items of a tuple, or the usual names of a dict. Targets are class numbers, or rows of probabilities.
    """

    def __init__(
        self,
        train: Iterable[Any] | None = None,
        val: Iterable[Any] | None = None,
        *,
        input: Pick | None = None,
        target: Pick | None = None,
    ) -> None:
        self.train, self.val = train, val
        self._input, self._target = input, target
        self.classes: int | None = None

    def inputs(self, batch: Any) -> Any:
        return self.split(batch)[0]

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(self.split(batch)[0])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        target = self.split(batch)[1]
        logits = logits_of(outputs)
        return F.cross_entropy(logits, self._fitting(target, logits))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        sums: Tensor | None = None  # of hits, hits among five, losses, images; looked at once, at the end
        for batch in batches:
            logits = logits_of(self.forward(model, batch))
            target = self._fitting(self.split(batch)[1], logits)
            loss = F.cross_entropy(logits, target, reduction="sum").double()
            classes = target.argmax(-1) if target.is_floating_point() else target
            best = logits.topk(min(5, logits.shape[-1]), -1).indices
            hits, five = (best[:, 0] == classes).sum(), (best == classes[:, None]).sum()
            here = torch.stack([hits.double(), five.double(), loss, (classes != IGNORED).sum().double()])
            sums = here if sums is None else sums + here
            self.classes = logits.shape[-1]
        sums = total(sums, 4)
        if not sums[3]:
            raise BatchError("val: expected at least one batch with targets; the loader gave none")
        accuracy, top5, mean, _ = (sums / sums[3]).tolist()
        return {"accuracy": accuracy, "loss": mean} | ({"top5": top5} if (self.classes or 0) > 10 else {})

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        return distillation(logits_of(outputs), logits_of(teacher), temperature)

    def draw(self, outputs: Any, batch: Any, temperature: float = 1.0) -> Tensor:
        """A random loss, of which the square of the gradient is on average the curvature of the loss.

        The mean of v z over images, with v = (diag(r) - p r^T) e, p = softmax(z / T), r = sqrt(p), e random signs: v
        has mean 0 and the covariance diag(p) - p p^T of cross entropy. At a temperature: of distillation, from any
        teacher.
        """
        logits, target = logits_of(outputs) / temperature, self.split(batch)[1]
        p = logits.detach().softmax(-1)
        signs = torch.randint_like(p, 2) * 2 - 1
        v = p.sqrt() * signs - p * (p.sqrt() * signs).sum(-1, keepdim=True)
        counted = torch.ones_like(target[:, 0]) if target.ndim == 2 else (target != IGNORED).to(p.dtype)
        return ((v * logits).sum(-1) * counted).sum() / counted.sum().clamp_min(1)

    def soften(self, batch: Any, classes: int, smoothing: float, mix: Any = None) -> Pair:
        """The batch with rows of probabilities as targets; `mix` is a timm Mixup, which smooths by itself.

        Raises:
            BatchError: it is to be mixed, and was mixed already.
        """
        x, y = self.split(batch)
        if y.is_floating_point():
            if mix is not None:
                raise BatchError("mixup, cutmix: the loader gives rows of probabilities, mixed already; leave them out")
            return Pair(x, y * (1 - smoothing) + smoothing / classes)
        x, y = x[y != IGNORED], y[y != IGNORED]
        rows = F.one_hot(y, classes).to(x.dtype) * (1 - smoothing) + smoothing / classes
        even = len(x) - len(x) % 2  # timm mixes even batches; an odd one's last image stays as it is
        if mix is None or not even:
            return Pair(x, rows)
        mixed, soft = mix(x[:even].clone(), y[:even])
        return Pair(torch.cat([mixed, x[even:]]), torch.cat([soft.to(rows), rows[even:]]))

    def split(self, batch: Any) -> tuple[Tensor, Tensor]:
        """
        Raises:
            BatchError: the batch has no input and target where they are looked for.
        """
        if isinstance(batch, Pair):
            return batch
        try:
            x = self._pick(batch, self._input, 0, INPUTS)
            y = self._pick(batch, self._target, 1, TARGETS)
        except (LookupError, TypeError, AttributeError) as error:
            raise BatchError(_unlike(batch, f"{type(error).__name__}: {error}")) from error
        if isinstance(y, Integral) or (isinstance(y, Tensor) and y.ndim == 0):
            raise BatchError(
                f"the loader: expected batches; got single samples, the first {describe(batch)}. "
                "Wrap the dataset: torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True)"
            )
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            raise BatchError(_unlike(batch, "input and target are to be tensors"))
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if y.ndim > 2 or len(x) != len(y) or (y.ndim == 2 and not y.is_floating_point()):
            raise BatchError(
                _unlike(batch, "targets are to be one class number, or one row of probabilities, an image")
            )
        if y.ndim == 2:
            return x, y
        if y.is_floating_point() and not bool((y == y.round()).all()):
            raise BatchError(
                "targets: expected class numbers; got fractions. Classification is not for regression: give a task "
                "with a loss of its own (see compress.Task)"
            )
        return x, y.long()

    @staticmethod
    def _pick(batch: Any, where: Pick | None, position: int, names: tuple[str, ...]) -> Any:
        if callable(where):
            return where(batch)
        if where is not None:
            return batch[where]
        if isinstance(batch, Mapping):
            return batch[next((name for name in names if name in batch), names[0])]
        if isinstance(batch, (tuple, list)) and len(batch) >= 2:
            return batch[position]
        raise TypeError("neither a pair nor a dict")

    def _fitting(self, target: Tensor, logits: Tensor) -> Tensor:
        """
        Raises:
            BatchError: a target is not one of the classes that the model tells apart.
        """
        classes = logits.shape[-1]
        if target.ndim == 2:
            if target.shape[1] != classes:
                raise BatchError(f"targets: expected rows of {classes} probabilities, got rows of {target.shape[1]}")
            return target.to(logits.dtype)
        if target.device.type == "cpu":  # elsewhere the kernel itself asserts, and looking would stop the stream
            bad = target[((target < 0) | (target >= classes)) & (target != IGNORED)]
            if len(bad):
                raise BatchError(
                    f"targets: expected classes 0 to {classes - 1}, as the model has {classes} outputs; got "
                    f"{int(bad[0])}. Give the model an output for each class, and number the classes from 0."
                )
        return target


def logits_of(outputs: Any) -> Tensor:
    """The scores of the classes: the output itself, its `logits`, or the first of several (auxiliary heads follow).

    Raises:
        BatchError: the model returns something else.
    """
    if isinstance(outputs, Mapping) and "logits" in outputs:
        outputs = outputs["logits"]
    logits = getattr(outputs, "logits", outputs)
    if isinstance(logits, (tuple, list)) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        came = f"a tensor of shape {list(logits.shape)}" if isinstance(logits, Tensor) else describe(outputs)
        raise BatchError(
            f"the model: expected a row of class scores an image, got {came}. Anything but classification needs a "
            "task: an object with inputs, forward, loss, evaluate and distil (see compress.Task)."
        )
    return logits


def task_from(name: str) -> Task:
    """The task that `package.module:factory` makes.

    Raises:
        ValueError: there is no such factory, or it makes something else.
    """
    module, _, factory = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"task {name}: {error}. Expected package.module:factory, importable from here.") from error
    return check_task(make(), f"task {name}")


def check_task(task: Any, where: str = "task") -> Task:
    """
    Raises:
        TypeError: something that a task has is missing.
    """
    names = ("train", "val", "inputs", "forward", "loss", "evaluate", "distil")
    if missing := [name for name in names if not hasattr(task, name)]:
        raise TypeError(f"{where}: expected a compress.Task; {type(task).__name__} has no {', '.join(missing)}")
    checked: Task = task
    return checked


def checked(found: Any, task: Task) -> dict[str, float]:
    """What `task.evaluate` measured, as plain numbers.

    Raises:
        TypeError: it is something else than numbers by name.
    """
    where = f"{type(task).__name__}.evaluate: expected a dict of numbers by name, such as {{'accuracy': 0.9}}; got"
    if not isinstance(found, Mapping):
        raise TypeError(f"{where} {describe(found)}")
    for name, value in found.items():
        if not isinstance(name, str) or not callable(getattr(value, "__float__", None)):
            raise TypeError(f"{where} {name!r}: {describe(value)}")
    return {name: float(value) for name, value in found.items()}


def describe(value: Any) -> str:
    """What came, in a few words."""
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}"
    if isinstance(value, Mapping):
        return "a dict of " + ", ".join(f"{k!r}: {describe(v)}" for k, v in list(value.items())[:6])
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of " + (", ".join(describe(v) for v in value[:4]) or "nothing")
    return type(value).__name__


def _unlike(batch: Any, why: str) -> str:
    return (
        f"the loader: expected batches of (input, target) or a dict with {INPUTS[0]} and {TARGETS[0]}; "
        f"got {describe(batch)} ({why}). Say where they lie:\n"
        "    task = compress.Classification(train, val, input=lambda batch: ..., target=lambda batch: ...)\n"
        "    compress.prune(model, recipe, task=task)"
    )
