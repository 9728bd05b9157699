"""Gradients of a batch: in micro-batches that fit into memory, in mixed precision, averaged over processes.

The batch of a step is everything that all processes read for it, including accumulated batches. Each term of its loss
is a mean over samples or targets, so the gradients of micro-batches are added up, weighted by their share of them. The
result does not depend on the division, except for batch norms, which see one micro-batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from compress.data import AccumulatedBatch, batch_size_of, batches_of_step, split_batch
from compress.distributed import all_reduce_mean, all_reduce_sum, world_size
from compress.recipe import Precision

INITIAL_LOSS_SCALE, LOSS_SCALE_GROWTH_INTERVAL = 2.0**16, 2000  # as in torch.amp.GradScaler

T = TypeVar("T")
LossTerms = Callable[[Any], Mapping[str, Tensor]]  # micro-batch -> terms of the loss by name
Count = Callable[[Any], float | None]  # batch -> number of samples or targets that a mean is over; None: unknown


class GradientResult(NamedTuple):
    """Terms of the loss and gradients, as means over a whole step; `unused`: no process used the tensor."""

    terms: dict[str, Tensor]
    gradients: list[Tensor]
    unused: list[bool]

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

    @property
    def state(self) -> dict[str, float]:
        """Return the values that a resumed run needs, under the keys of a checkpoint."""
        return {"pieces": self.num_micro_batches, "scale": self.loss_scale, "since": self.steps_since_overflow}

    def restore_(self, state: Mapping[str, float]) -> None:
        """Restore the values of `state`."""
        self.num_micro_batches, self.loss_scale = int(state["pieces"]), state["scale"]
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
    ) -> GradientResult:
        """Return the terms of a batch's loss, and `factor` times the gradient of their sum.

        If memory does not suffice, micro-batches are halved; if half precision overflows, the loss scale is halved.
        Then the passes are repeated: no step is skipped.

        Args:
            loss_terms: called with each micro-batch; must not change anything.
            tensors: with respect to which to differentiate.
            counts: by name of a term, counts the samples or targets that it is the mean over; default: the samples.
                A term that is the mean over nothing is left out. None: the term is a sum, not a mean.

        Raises:
            torch.OutOfMemoryError: a single sample does not fit into memory.
        """
        # Outside the loop: processes repeat the passes independently of each other, but have to communicate in step.
        process_weights = _process_weights(batch, counts or {})
        while True:
            try:
                weights = self._term_weights(batch, counts or {}, process_weights)
                terms, gradients = self._run_passes(loss_terms, batch, list(tensors), factor, weights)
            except RuntimeError as error:
                if not _is_out_of_memory(error) or not self._halve_micro_batches(batch):
                    raise
            else:
                result = self._reduce(terms, gradients, tensors)
                if result is not None:
                    return result
            _clear_device_cache()

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
                weights_of_part[name] = world_size()  # `_reduce` takes the mean over the processes
        return weights

    def _run_passes(
        self,
        loss_terms: LossTerms,
        batch: Any,
        tensors: list[Tensor],
        factor: float,
        weights: Sequence[Mapping[str, float]],
    ) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Return terms of the loss and scaled gradients of this process, summed over the micro-batches."""
        sums: dict[str, Tensor] = {}
        totals: list[Tensor | None] = [None] * len(tensors)
        for micro_batch, weights_of_part in zip(self.micro_batches(batch), weights, strict=True):
            with self.autocast():
                terms = {name: term.reshape(()) for name, term in loss_terms(micro_batch).items()}
            weight_of = {name: weights_of_part.get(name, weights_of_part[""]) for name in terms}
            loss = _weighted_sum(terms, weight_of, factor * self.loss_scale)
            gradients = _gradients_of(loss, tensors) if loss is not None else [None] * len(tensors)
            for i, gradient in enumerate(gradients):
                total = totals[i]
                totals[i] = gradient if total is None else total if gradient is None else total.add_(gradient)
            for name, term in terms.items():
                # The mean over nothing may be NaN.
                value = term.detach() * weight_of[name] if weight_of[name] else torch.zeros_like(term)
                sums[name] = sums[name] + value if name in sums else value
            del terms, loss, gradients  # frees the graph before the next forward pass
        return sums, totals

    def _reduce(
        self, terms: dict[str, Tensor], local_gradients: list[Tensor | None], tensors: Sequence[Tensor]
    ) -> GradientResult | None:
        """Return means over the processes; None if they overflow and the loss scale was halved."""
        unused = [g is None for g in local_gradients]
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(tensors, local_gradients, strict=True)]
        if world_size() > 1:  # gradients, terms and flags in one message
            flags = torch.tensor(unused, dtype=filled[0].dtype, device=filled[0].device)
            *means, flags = all_reduce_mean([*filled, *terms.values(), flags])
            unused = [flag == 1 for flag in flags.tolist()]
        else:
            means = [*filled, *terms.values()]
        gradients, values = means[: len(filled)], means[len(filled) :]
        if self.precision == "fp16":
            finite = bool(torch.stack(torch._foreach_norm(gradients, torch.inf)).isfinite().all())
            if not finite and self.loss_scale > 1:
                self.loss_scale, self.steps_since_overflow = self.loss_scale / 2, 0
                return None
            gradients = [g / self.loss_scale for g in gradients]
            self.steps_since_overflow += 1
            if self.steps_since_overflow == LOSS_SCALE_GROWTH_INTERVAL:
                self.loss_scale, self.steps_since_overflow = self.loss_scale * 2, 0
        return GradientResult(dict(zip(terms, values, strict=True)), gradients, unused)

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
    message = [*(total or 0.0 for total in totals), *(float(total is None) for total in totals)]
    sums = all_reduce_sum(torch.tensor(message, dtype=torch.float64), len(message)).tolist()
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


def _gradients_of(loss: Tensor, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return gradients; None for frozen tensors: mmdet's ResNets freeze stages when they enter training mode."""
    trainable = [p for p in tensors if p.requires_grad]
    gradients = iter(torch.autograd.grad(loss, trainable, allow_unused=True))
    return [next(gradients) if p.requires_grad else None for p in tensors]


def _is_out_of_memory(error: RuntimeError) -> bool:
    from accelerate.utils.memory import should_reduce_batch_size

    return bool(should_reduce_batch_size(error))


def _clear_device_cache() -> None:
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)
