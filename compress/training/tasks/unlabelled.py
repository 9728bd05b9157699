"""Unlabelled: training on inputs alone, with the teacher's predictions in place of labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from compress.data import batch_size_of

from .batch_fields import INPUTS, TARGETS, pick_field
from .classification import Classification, SoftBatch, logits_of

BATCH_SIZE = 64  # of a tensor of inputs


def has_labels(batch: Any) -> bool:
    """Return whether a batch may hold targets: it is neither a tensor, nor alone in a list, nor a dict without them."""
    if isinstance(batch, Mapping):
        return any(name in batch for name in TARGETS) or not any(name in batch for name in INPUTS)
    return not (isinstance(batch, Tensor) or (isinstance(batch, Sequence) and len(batch) == 1))


def as_batches(data: Any) -> Any:
    """Return a loader of the rows of a tensor, shuffled, in batches of about equal size; anything else as it is."""
    if not isinstance(data, Tensor) or data.ndim < 2 or not len(data):
        return data
    count = -(-len(data) // BATCH_SIZE)
    return DataLoader(TensorDataset(data), -(-len(data) // count), shuffle=True)


class Unlabelled(Classification):
    """Imitate a teacher: its class probabilities are the targets; without labels, `accuracy` is the agreement with it.

    Args:
        train: loader of inputs: tensors, lists of one tensor, or dicts with one of the usual names.
        val: loader for evaluation, of inputs alone or with labels.
        teacher: the network to imitate, in eval mode.
    """

    def __init__(self, train: Iterable[Any] | None, val: Iterable[Any] | None, teacher: nn.Module) -> None:
        super().__init__(train, val)
        self.teacher = teacher
        self._last: tuple[Tensor, Tensor] | None = None  # inputs and targets of the last batch

    def inputs(self, batch: Any) -> Any:
        if has_labels(batch):
            return super().inputs(batch)
        if isinstance(batch, Mapping):
            return pick_field(batch, None, 0, INPUTS)
        return batch if isinstance(batch, Tensor) else batch[0]

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(self.inputs(batch))

    def count_targets(self, batch: Any) -> int:
        return super().count_targets(batch) if has_labels(batch) else batch_size_of(batch) or 1

    def split(self, batch: Any) -> tuple[Tensor, Tensor]:
        if isinstance(batch, SoftBatch) or has_labels(batch):
            return super().split(batch)
        x = self.inputs(batch)
        if self._last is None or self._last[0] is not x:
            with torch.no_grad():
                self._last = x, logits_of(self.teacher(x.clone())).float().softmax(-1)
        return self._last
