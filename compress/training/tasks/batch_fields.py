"""Fields of a batch: where input and target are in the tuples and dicts that loaders give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor

from compress.errors import BatchError
from compress.formatting import describe_value

Pick = str | int | Callable[[Any], Any]  # key, position or function that takes a value out of a batch
INPUTS = ("image", "images", "input", "inputs", "pixel_values", "img", "x", "data")
TARGETS = ("label", "labels", "target", "targets", "y", "class")
MASKS = ("mask", "masks", "segmentation", "semantic", *TARGETS, "pixel_labels", "annotation")
IGNORED = -100  # target that losses ignore


def pick_field(batch: Any, where: Pick | None, position: int, names: Sequence[str]) -> Any:
    """Return a field of a batch.

    Args:
        where: of the field; default: the first of `names` that a dict has, or `position` in a tuple.

    Raises:
        LookupError: there is no such field.
        TypeError: the batch is neither a pair nor a dict.
    """
    if callable(where):
        return where(batch)
    if where is not None:
        return batch[where]
    if isinstance(batch, Mapping):
        return batch[next((name for name in names if name in batch), names[0])]
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return batch[position]
    raise TypeError("neither a pair nor a dict")


def split_fields(
    batch: Any, input: Pick | None, target: Pick | None, names: Sequence[str], task: str
) -> tuple[Tensor, Tensor]:
    """Return input and target of a batch, which have to be tensors.

    Args:
        names: of the target in a dict.
        task: name of the task's class, for messages.

    Raises:
        BatchError: they are not found, or are not tensors of the same number of samples.
    """
    try:
        x, y = pick_field(batch, input, 0, INPUTS), pick_field(batch, target, 1, names)
    except (LookupError, TypeError, AttributeError) as error:
        raise describe_mismatch(batch, f"{type(error).__name__}: {error}", task, names[0]) from error
    if isinstance(y, Integral) or (isinstance(y, Tensor) and y.ndim == 0):
        raise single_sample(batch)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise describe_mismatch(batch, "input and target must be tensors", task, names[0], y)
    return x, y


def single_sample(batch: Any) -> BatchError:
    """Return the error of a loader that gives samples instead of batches."""
    return BatchError(
        f"the loader: expected batches; got single samples, the first {describe_value(batch)}. "
        "Wrap the dataset: torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True)"
    )


def describe_mismatch(batch: Any, reason: str, task: str, target_name: str, target: Any = None) -> BatchError:
    """Return the error of a batch that a task cannot read: what it is, and the task that fits it.

    Args:
        reason: why it cannot be read.
        task: name of the task's class.
        target_name: usual name of the target in a dict.
        target: the target, if it was found.
    """
    start = (
        f"the loader: expected batches of (input, target) or a dict with {INPUTS[0]} and {target_name}; "
        f"got {describe_value(batch)} ({reason})."
    )
    if better := _task_of(target):
        return BatchError(
            f"{start} The targets are {better[0]}:\n    {better[1]}\n    compress.prune(model, recipe, task=task)"
        )
    if isinstance(batch, Tensor) and task != "Classification":
        return BatchError(
            f"{start} Without targets there is no loss: use a search that reads no data, such as magnitude, and "
            "compensate: least_squares with calibration=INPUTS"
        )
    return BatchError(
        f"{start} Say where they are:\n"
        f"    task = compress.{task}(train, val, input=lambda batch: ..., target=lambda batch: ...)\n"
        "    compress.prune(model, recipe, task=task)"
    )


def _task_of(target: Any) -> tuple[str, str] | None:
    """Return a description of targets of another task and the line that makes the task; None for other targets."""
    if isinstance(target, Tensor):
        masks = target.ndim > 2 and not target.is_complex()
        return ("masks", "task = compress.Segmentation(train, val)") if masks else None
    first = target[0] if isinstance(target, (list, tuple)) and len(target) else None
    if not isinstance(first, Mapping) or "boxes" not in first:
        return None
    if "labels" in first:
        return "boxes, as torchvision's detectors take them", "task = compress.Detection(train, val)"
    if "class_labels" in first:
        return "boxes, as Hugging Face's detectors take them", "task = compress.hf.task(model, train, val)"
    return (
        "boxes, but not as torchvision's detectors take them",
        "task = YourTask(train, val)  # with inputs, forward, loss, evaluate and distil: see compress.Task",
    )
