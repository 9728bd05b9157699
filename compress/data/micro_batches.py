"""Micro-batches: parts of a batch, and batches that are accumulated into one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass
class AccumulatedBatch:
    """Batches whose gradients are accumulated into one step."""

    batches: list[Any]


def batches_of_step(batch: Any) -> list[Any]:
    """Return the batches of a step: those of an `AccumulatedBatch`, or the batch itself."""
    return batch.batches if isinstance(batch, AccumulatedBatch) else [batch]


def batch_size_of(batch: Any) -> int | None:
    """Return the number of samples of a batch, or None if its tensors have no common first dimension."""
    if lists := _image_lists(batch):
        return len(lists[0])
    if values := _labelled_images(batch):
        return len(values[0])
    lengths = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.ndim else None for leaf in pytree.tree_leaves(batch)}
    return lengths.pop() if len(lengths) == 1 else None


def split_batch(batch: Any, count: int) -> list[Any]:
    """Return a batch in `count` parts, at least one sample each; undivided if its samples are not known."""
    length = batch_size_of(batch)
    if length is None or count == 1 or length < 2:
        return [batch]
    size = -(-length // count)
    return [slice_batch(batch, start, start + size) for start in range(0, length, size)]


def slice_batch(batch: Any, start: int, end: int) -> Any:
    """Return samples `start` to `end` of a batch whose `batch_size_of` is known."""
    if lists := _image_lists(batch):
        parts = [part[start:end] for part in lists]
        return dict(zip(batch, parts, strict=True)) if isinstance(batch, Mapping) else type(batch)(parts)
    if values := _labelled_images(batch):
        return dict(zip(batch, (value[start:end] for value in values), strict=True))
    return pytree.tree_map(lambda leaf: leaf[start:end], batch)


def _image_lists(batch: Any) -> list[Any]:
    """Return the lists of images and targets of a detection batch; empty for other batches."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else list(batch) if type(batch) in (tuple, list) else []
    same_length = len({len(part) if isinstance(part, (list, tuple)) else 0 for part in parts}) == 1
    images = [leaf for part in parts[:1] for leaf in (part if isinstance(part, (list, tuple)) else [])]
    return parts if same_length and images and all(isinstance(i, Tensor) and i.ndim == 3 for i in images) else []


def _labelled_images(batch: Any) -> list[Any]:
    """Return the values of a dict of tensors and of lists with a dict for each image, as DETR's; empty for others."""
    values = list(batch.values()) if isinstance(batch, Mapping) else []
    if not any(isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value) for value in values):
        return []
    sized = all(isinstance(value, list) or (isinstance(value, Tensor) and value.ndim) for value in values)
    return values if sized and len({len(value) for value in values}) == 1 else []
