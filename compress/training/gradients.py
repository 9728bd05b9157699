"""Gradients of a batch: in micro-batches that fit into memory, in mixed precision, averaged over processes.

The batch of a step is everything that all processes read for it, including accumulated batches. Each term of its loss
is a mean over samples or targets, so the gradients of micro-batches are added up, weighted by their share of them. The
result does not depend on the division, except for batch norms, which see one micro-batch at a time. parallel/ runs
the backward passes and averages over the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from compress.data import AccumulatedBatch, batch_size_of, batches_of_step, split_batch
from compress.distributed import all_reduce_mean, sum_numbers, world_size
from compress.recipe import Precision

from .parallel.reduction import Reduction, Reductions

INITIAL_LOSS_SCALE, LOSS_SCALE_GROWTH_INTERVAL = 2.0**16, 2000  # as in torch.amp.GradScaler

T = TypeVar("T")
LossTerms = Callable[[Any], Mapping[str, Tensor]]  # micro-batch -> terms of the loss by name
Count = Callable[[Any], float | None]  # batch -> number of samples or targets that a mean is over; None: unknown


class GradientResult(NamedTuple):
    """Terms of the loss and gradients, as means over a whole step; `unused`: no process used the tensor.

    `measured` holds what the passes measured beside the loss, as sums over all samples of the step.
    """

    terms: dict[str, Tensor]
    gradients: list[Tensor]
    unused: list[bool]
    measured: dict[str, Tensor]

    @property
    def loss(self) -> Tensor:
        """Return the sum of the terms."""
        return torch.stack(list(self.terms.values())).sum()


class GradientComputer:
    """Compute losses and gradients of batches.

    Args:
        message: called with a text where the memory does not suffice.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        precision: Precision = "float32",
        message: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.device, self.precision, self.message = device or torch.device("cpu"), precision, message
        self.num_micro_batches = 1  # per batch
        self.loss_scale, self.steps_since_overflow = (INITIAL_LOSS_SCALE if precision == "fp16" else 1.0), 0
        # By id of the batch, which is kept so that the id stays valid: the batch, and its parts.
        self._micro_batches: dict[int, tuple[Any, list[Any]]] = {}
        self._reductions = Reductions()

    @property
    def state(self) -> dict[str, float]:
        """Return the values that a resumed run needs, under the keys of a checkpoint."""
        return {"micro_batches": self.num_micro_batches, "scale": self.loss_scale, "since": self.steps_since_overflow}

    def restore_(self, state: Mapping[str, float]) -> None:
        """Restore the values of `state`."""
        self.num_micro_batches, self.loss_scale = int(state["micro_batches"]), state["scale"]
        self.steps_since_overflow = int(state["since"])

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of forward passes in the precision of the recipe."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16 if self.precision == "bf16" else torch.float16)

    def gradients(
        self,
        loss_terms: LossTerms,
        batch: Any,
        tensors: Sequence[Tensor],
        factor: float = 1.0,
        counts: Mapping[str, Count | None] | None = None,
        reduction: Reduction | None = None,
        measured: Collection[str] = (),
    ) -> GradientResult:
        """Return the terms of a batch's loss, and `factor` times the gradient of their sum.

        If memory does not suffice, micro-batches are halved; if half precision overflows, the loss scale is halved.
        Then the passes are repeated: no step is skipped.

        Args:
            loss_terms: called with each micro-batch; must not change anything.
            tensors: with respect to which to differentiate.
            counts: by name of a term, counts the samples or targets that it is the mean over; default: the samples.
                A term that is the mean over nothing is left out. None: the term is a sum, not a mean.
            reduction: runs the backward passes; default: that of processes which all hold all tensors.
            measured: names of terms that are no part of the loss: sums over samples, of any shape, which are added up.

        Raises:
            torch.OutOfMemoryError: a single sample does not fit into memory.
        """
        # Frozen tensors have no gradient: mmdet's ResNets freeze stages when they enter training mode.
        trainable = [t for t in tensors if t.requires_grad]
        reduction = reduction or self._reductions.of(trainable)
        # Outside the loop: processes repeat the passes independently of each other, but have to communicate in step.
        process_weights = _process_weights(batch, counts or {})
        while True:
            reduction.begin()
            sums: dict[str, Tensor] = {}
            failed = False
            try:
                weights = self._term_weights(batch, counts or {}, process_weights)
                sums = self._run_passes(loss_terms, batch, factor, weights, reduction, measured)
            except RuntimeError as error:
                if not _is_out_of_memory(error) or not self._can_repeat(reduction, batch):
                    raise
                failed = True
            reduced = reduction.finish(failed)
            if reduced is not None and (gradients := self._unscaled(reduced.gradients)) is not None:
                means = dict(zip(sums, all_reduce_mean(list(sums.values())), strict=True))
                terms = {name: mean for name, mean in means.items() if name not in measured}
                totals = {name: mean * world_size() for name, mean in means.items() if name in measured}
                return GradientResult(terms, *_with_frozen(gradients, reduced.unused, tensors), totals)
            _clear_device_cache()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Free the buffers of the processes' communication at the end of the block, in which gradients are computed."""
        try:
            yield
        finally:
            self._reductions.release()

    def run_micro_batches(self, function: Callable[[Any], T], batch: Any) -> list[T]:
        """Return the results of a function of each micro-batch; halve micro-batches if memory does not suffice.

        Raises:
            torch.OutOfMemoryError: a single sample does not fit into memory.
        """
        while True:
            try:
                with self.autocast():
                    return [function(micro_batch) for micro_batch in self.micro_batches(batch)]
            except RuntimeError as error:
                if not _is_out_of_memory(error) or not self._halve_micro_batches(batch):
                    raise
            _clear_device_cache()

    def micro_batches(self, batch: Any) -> list[Any]:
        """Return the micro-batches of a batch; the same objects in each call."""
        if self.num_micro_batches == 1 and not isinstance(batch, AccumulatedBatch):
            return [batch]
        if id(batch) not in self._micro_batches:
            while len(self._micro_batches) > 1:  # no step reads more than two batches
                del self._micro_batches[next(iter(self._micro_batches))]
            parts = [p for one in batches_of_step(batch) for p in split_batch(one, self.num_micro_batches)]
            self._micro_batches[id(batch)] = (batch, parts)
        return self._micro_batches[id(batch)][1]

    def _term_weights(
        self, batch: Any, counts: Mapping[str, Count | None], process_weights: Mapping[str, float]
    ) -> list[dict[str, float]]:
        """Return the weights of the terms of each micro-batch, by name; under "" that of all other terms."""
        micro_batches = self.micro_batches(batch)
        if len(micro_batches) == 1 and world_size() == 1:
            return [{"": 1.0}]
        weights: list[dict[str, float]] = [{} for _ in micro_batches]
        for name, count in _all_counts(counts).items():
            numbers = _numbers(count, micro_batches)
            total = _sum_known(numbers)
            for weights_of_part, number in zip(weights, numbers, strict=True):
                share = 1 / len(numbers) if total is None else (number or 0) / total if total else 0.0
                weights_of_part[name] = share * process_weights[name]
        for name in (name for name, count in counts.items() if count is None):
            for weights_of_part in weights:
                weights_of_part[name] = world_size()  # gradients are means over the processes
        return weights

    def _run_passes(
        self,
        loss_terms: LossTerms,
        batch: Any,
        factor: float,
        weights: Sequence[Mapping[str, float]],
        reduction: Reduction,
        measured: Collection[str],
    ) -> dict[str, Tensor]:
        """Run the passes of all micro-batches; return the terms of this process, summed over them."""
        sums: dict[str, Tensor] = {}

        def loss_of(micro_batch: Any, weights_of_part: Mapping[str, float]) -> Tensor | None:
            with self.autocast():
                all_terms = loss_terms(micro_batch)
            for name in (name for name in measured if name in all_terms):
                value = all_terms[name].detach()
                sums[name] = sums[name] + value if name in sums else value
            terms = {name: term.reshape(()) for name, term in all_terms.items() if name not in measured}
            weight_of = {name: weights_of_part.get(name, weights_of_part[""]) for name in terms}
            for name, term in terms.items():
                # The mean over nothing may be NaN.
                value = term.detach() * weight_of[name] if weight_of[name] else torch.zeros_like(term)
                sums[name] = sums[name] + value if name in sums else value
            loss = _weighted_sum(terms, weight_of, factor * self.loss_scale)
            return torch.stack(list(terms.values())).sum() * 0 if loss is None and reduction.in_lockstep else loss

        micro_batches = self.micro_batches(batch)
        for i, (micro_batch, weights_of_part) in enumerate(zip(micro_batches, weights, strict=True)):
            reduction.add(partial(loss_of, micro_batch, weights_of_part), is_last=i == len(micro_batches) - 1)
        return sums

    def _unscaled(self, gradients: list[Tensor]) -> list[Tensor] | None:
        """Return the gradients without the loss scale; None if they overflow and the scale was halved."""
        if self.precision != "fp16" or not gradients:
            return gradients
        finite = bool(torch.stack(torch._foreach_norm(gradients, torch.inf)).isfinite().all())
        if not finite and self.loss_scale > 1:
            self.loss_scale, self.steps_since_overflow = self.loss_scale / 2, 0
            return None
        unscaled = [g / self.loss_scale for g in gradients]
        self.steps_since_overflow += 1
        if self.steps_since_overflow == LOSS_SCALE_GROWTH_INTERVAL:
            self.loss_scale, self.steps_since_overflow = self.loss_scale * 2, 0
        return unscaled

    def _can_repeat(self, reduction: Reduction, batch: Any) -> bool:
        """Make the micro-batches smaller after a pass that did not fit into memory; return False if that is no use."""
        if reduction.in_lockstep:
            self.message(
                f"out of memory on {self.device}: sharded processes cannot divide a batch on their own. Use smaller "
                "batches, and engine.accumulate to make up for it"
            )
            return False
        return self._halve_micro_batches(batch)

    def _halve_micro_batches(self, batch: Any) -> bool:
        """Double the number of micro-batches; return False if they are single samples already."""
        most = max((batch_size_of(one) or 1) for one in batches_of_step(batch))
        if self.num_micro_batches >= most:
            self.message(f"out of memory on {self.device}: even a single sample does not fit. Use smaller images")
            return False
        self.num_micro_batches *= 2
        self._micro_batches.clear()
        self.message(
            f"out of memory on {self.device}: from now on each batch is run in {self.num_micro_batches} micro-batches "
            "whose gradients are added up. Batch norms see one micro-batch at a time"
        )
        return True


def _all_counts(counts: Mapping[str, Count | None]) -> dict[str, Count]:
    """Return the counts of the terms that are means; under "" that of the terms that are not named."""
    return {"": batch_size_of, **{name: count for name, count in counts.items() if count is not None}}


def _process_weights(batch: Any, counts: Mapping[str, Count | None]) -> dict[str, float]:
    """Return this process's share of what each term is the mean over, times the number of processes."""
    all_counts = _all_counts(counts)
    if world_size() == 1:
        return dict.fromkeys(all_counts, 1.0)
    totals = [_sum_known(_numbers(count, batches_of_step(batch))) for count in all_counts.values()]
    sums = sum_numbers([*(total or 0.0 for total in totals), *(float(total is None) for total in totals)])
    weights = {}
    for name, total, everywhere, unknown in zip(all_counts, totals, sums, sums[len(totals) :], strict=False):
        weights[name] = 1.0 if unknown or total is None or not everywhere else total * world_size() / everywhere
    return weights


def _numbers(count: Count, batches: Sequence[Any]) -> list[float | None]:
    """Return the counts of batches as Python numbers: a quotient of integer tensors would be in single precision."""
    return [None if (number := count(one)) is None else float(number) for one in batches]


def _sum_known(numbers: Sequence[float | None]) -> float | None:
    """Return the sum of the numbers; None if one is unknown."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def _weighted_sum(terms: Mapping[str, Tensor], weights: Mapping[str, float], factor: float) -> Tensor | None:
    """Return `factor` times the weighted sum of the terms; None if all weights are zero."""
    used = {name: term for name, term in terms.items() if weights[name]}
    if not used:
        return None
    if len({weights[name] for name in used}) == 1:  # as a rule: one multiplication, after the sum
        factor *= weights[next(iter(used))]
        loss = torch.stack(list(used.values())).sum()
    else:
        loss = torch.stack([term * weights[name] for name, term in used.items()]).sum()
    return loss * factor if factor != 1 else loss


def _with_frozen(
    gradients: Sequence[Tensor], unused: Sequence[bool], tensors: Sequence[Tensor]
) -> tuple[list[Tensor], list[bool]]:
    """Return gradients and flags of all tensors: frozen ones are unused."""
    trained = iter(zip(gradients, unused, strict=True))
    pairs = [next(trained) if t.requires_grad else (torch.zeros_like(t), True) for t in tensors]
    return [gradient for gradient, _ in pairs], [flag for _, flag in pairs]


def _is_out_of_memory(error: RuntimeError) -> bool:
    from accelerate.utils.memory import should_reduce_batch_size

    return bool(should_reduce_batch_size(error))


def _clear_device_cache() -> None:
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)
