"""LabelledTask: base of the tasks whose batches hold an input and a target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..task import Task
from .batch_fields import Pick


class LabelledTask(Task):
    """A task that knows where input and target are in a batch; a subclass writes `split`, which takes them out.

    Args:
        train: loader of training batches.
        val: loader of validation batches.
        input: where the input is in a batch: a key, a position or a function. Default: the first item of a tuple, or
            the usual names of a dict.
        target: where the target is, likewise.
    """

    sums_over_processes = True

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

    def inputs(self, batch: Any) -> Any:
        return self.split(batch)[0]

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Return input and target of a batch.

        Raises:
            BatchError: they are not found, or are not what the task takes.
        """
        raise NotImplementedError
