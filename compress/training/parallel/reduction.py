"""Gradients of a step: of one process, or of several through torch's DistributedDataParallel.

A reduction gets the losses of a step's micro-batches one after the other and returns the gradients of their sum, as
means over the processes. DistributedDataParallel reduces them in buckets while the backward pass of the last
micro-batch goes on. It is given the tensors to differentiate, not the model: so it serves every search, whatever the
search differentiates, and the code of a task may call the model as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compress.distributed import sum_numbers, world_size

Loss = Callable[[], Tensor | None]  # runs a forward pass; None if the micro-batch has no loss


class ReducedGradients(NamedTuple):
    """Gradients as means over the processes; zeros where `unused`: no process used the tensor."""

    gradients: list[Tensor]
    unused: list[bool]


class Reduction(Protocol):
    """Gradients of one step; `begin` starts the next."""

    in_lockstep: bool  # all processes have to make the same passes: none may repeat its own, or leave one out

    def begin(self) -> None: ...

    def add(self, loss: Loss, is_last: bool) -> None: ...

    def finish(self, failed: bool = False) -> ReducedGradients | None: ...


class LocalGradients:
    """Gradients of one process: those of the micro-batches, added up."""

    in_lockstep = False

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self.sums: list[Tensor | None] = [None] * len(self.tensors)

    def add(self, loss: Loss, is_last: bool) -> None:
        """Add the gradients of a micro-batch."""
        value = loss()
        if value is None:
            return
        for i, gradient in enumerate(_gradients_of(value, self.tensors)):
            total = self.sums[i]
            self.sums[i] = gradient if total is None else total if gradient is None else total.add_(gradient)

    def finish(self, failed: bool = False) -> ReducedGradients | None:
        """Return the gradients; None if the passes failed and have to be repeated."""
        if failed:
            return None
        unused = [total is None for total in self.sums]
        return ReducedGradients(_zeros_where_none(self.sums, self.tensors), unused)


class DataParallelGradients:
    """Gradients of several processes, averaged by DistributedDataParallel.

    All processes have to call it in step, except for `begin`, and for `add` before the backward pass of the last
    micro-batch: up to there a process may start again on its own.

    Args:
        tensors: leaves that require gradients, the same in all processes.
    """

    in_lockstep = False

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self._used: set[int] = set()  # indices of tensors with a gradient in this step
        self._arrived: set[int] = set()  # and in the backward pass that is reduced
        self._is_reducing = False
        self._hooks: list[Any] = [
            t.register_post_accumulate_grad_hook(self._note_arrival(i))  # type: ignore[no-untyped-call]
            for i, t in enumerate(self.tensors)
        ]
        # The processes have the same values already. Batch norms have statistics of their own: there are no buffers.
        self._parallel = DistributedDataParallel(_LossModule(self.tensors), init_sync=False)
        self._fix_buckets()

    def begin(self) -> None:
        """Start a step."""
        self._used.clear()
        self._is_reducing = False
        for tensor in self.tensors:
            tensor.grad = None

    def add(self, loss: Loss, is_last: bool) -> None:
        """Add the gradients of a micro-batch; reduce them with the last."""
        self._arrived.clear()
        with nullcontext() if is_last else self._parallel.no_sync():
            value = self._parallel(loss)
            self._is_reducing = is_last
            if value is not None:
                value.backward(inputs=self.tensors)
        self._used |= self._arrived

    def finish(self, failed: bool = False) -> ReducedGradients | None:
        """Return the means over the processes; None if the passes of a process failed and all have to repeat them.

        Does not wait for the other processes if this one failed before it reduced anything.
        """
        if failed and not self._is_reducing:
            return None
        self._reduce_missing()
        flags = sum_numbers([float(failed), *(float(i not in self._used) for i in range(len(self.tensors)))])
        gradients = [t.grad for t in self.tensors]
        for tensor in self.tensors:
            tensor.grad = None
        if flags[0]:
            return None
        return ReducedGradients(_zeros_where_none(gradients, self.tensors), [f == world_size() for f in flags[1:]])

    def release(self) -> None:
        """Remove the hooks from the tensors."""
        for hook in self._hooks:
            hook.remove()

    def _note_arrival(self, index: int) -> Callable[[Tensor], None]:
        return lambda tensor: self._arrived.add(index)

    def _reduce_missing(self) -> None:
        """Pass zeros to DistributedDataParallel for the tensors whose gradients it still waits for."""
        for i in reversed(range(len(self.tensors))):
            if i not in self._arrived:
                torch.autograd.backward(self.tensors[i], torch.zeros_like(self.tensors[i]))
        self._arrived.clear()

    def _fix_buckets(self) -> None:
        """Make a pass of zeros, after whose order DistributedDataParallel arranges its buckets for good.

        Else it would do so after the first step, and sums of three or more processes would be rounded in another way
        after a resumed first step.
        """
        self.begin()
        self.add(lambda: None, is_last=True)
        self._reduce_missing()
        self.begin()


class _LossModule(nn.Module):
    """A module whose parameters are the tensors to differentiate, and whose output is a loss."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__()
        for i, tensor in enumerate(tensors):
            self.register_parameter(str(i), tensor)

    def forward(self, loss: Loss) -> Tensor | None:
        return loss()


class Reductions:
    """The reductions of a training, one for each list of tensors that it differentiates with respect to."""

    def __init__(self) -> None:
        self._data_parallel: dict[tuple[int, ...], DataParallelGradients] = {}

    def of(self, tensors: Sequence[Tensor]) -> Reduction:
        """Return the reduction of the gradients of tensors that require them."""
        if world_size() == 1 or not tensors:
            return LocalGradients(tensors)
        key = tuple(map(id, tensors))
        if key not in self._data_parallel:
            self._data_parallel[key] = DataParallelGradients(tensors)
        return self._data_parallel[key]

    def release(self) -> None:
        """Free the buckets and remove the hooks, at the end of a training."""
        for reduction in self._data_parallel.values():
            reduction.release()
        self._data_parallel.clear()


def _gradients_of(loss: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    return torch.autograd.grad(loss, tensors, allow_unused=True) if tensors else ()


def _zeros_where_none(gradients: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, gradients, strict=True)]
