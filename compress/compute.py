"""Passes: the gradients of a batch, in pieces that fit into memory, in the precision asked for, over all processes.

The batch of a step is all that its processes read, and all batches that are accumulated. Its loss is the mean over the
samples, so the pieces' gradients are added up by their shares; what comes out does not depend on how it was divided,
but for batch norms, which see a piece at a time, as in every framework.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from pydantic import Field
from torch import Tensor
from torch.utils import _pytree as pytree

from .fields import Strict
from .processes import mean, world

Precision = Literal["float32", "bf16", "fp16"]
FIRST_SCALE, GROWS_EVERY = 2.0**16, 2000  # of the loss in half precision: as torch.amp.GradScaler has them


class EngineConfig(Strict):
    """How everything that trains is run."""

    precision: Precision | None = Field(
        None, description="mixed precision of the passes (default: what `accelerate launch` says, else float32)"
    )
    accumulate: int | None = Field(
        None, ge=1, description="batches of a step (default: what `accelerate launch` says, else 1)"
    )
    compile: bool | str = Field(
        False, description="fine-tune compiled by torch.compile (true, or a backend): pays off in long runs on GPUs"
    )
    channels_last: bool = Field(False, description="images as GPUs and many CPUs like them: faster convolutions")
    sync_batchnorm: bool = Field(False, description="batch norms over all processes; else each has its own batches")
    track: tuple[str, ...] = Field(
        (), description="tensorboard, wandb, mlflow and others that accelerate knows", strict=False
    )

    @property
    def passes(self) -> Precision:
        """The precision that counts."""
        said = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        return self.precision or ("bf16" if said == "bf16" else "fp16" if said == "fp16" else "float32")

    @property
    def batches(self) -> int:
        """The batches of a step."""
        return self.accumulate or max(1, int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") or 1))


@dataclass
class Several:
    """Batches that make one step together."""

    batches: list[Any]


class Found(NamedTuple):
    """Terms of the loss and gradients, as means over the step's samples; `idle` is what no process used."""

    terms: dict[str, Tensor]
    gradients: list[Tensor]
    idle: list[bool]

    @property
    def loss(self) -> Tensor:
        return torch.stack(list(self.terms.values())).sum()


class Compute:
    """How losses are taken and differentiated."""

    def __init__(
        self,
        device: torch.device | None = None,
        precision: Precision = "float32",
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.device, self.precision, self.say = device or torch.device("cpu"), precision, say
        self.pieces = 1  # that each batch is run in
        self.scale, self.since = (FIRST_SCALE if precision == "fp16" else 1.0), 0
        self._cut: dict[int, tuple[Any, list[tuple[Any, float]]]] = {}

    @property
    def facts(self) -> dict[str, float]:
        """What a resumed run has to know."""
        return {"pieces": self.pieces, "scale": self.scale, "since": self.since}

    def restore_(self, facts: Mapping[str, float]) -> None:
        self.pieces, self.scale, self.since = int(facts["pieces"]), facts["scale"], int(facts["since"])

    def autocast(self) -> AbstractContextManager[Any]:
        """Forward passes in the precision asked for."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16 if self.precision == "bf16" else torch.float16)

    def gradients(
        self, terms_of: Callable[[Any], Mapping[str, Tensor]], batch: Any, wanted: Sequence[Tensor], factor: float = 1.0
    ) -> Found:
        """The terms of a batch's loss, and factor times the gradient of their sum with respect to what is wanted.

        `terms_of` is called with each piece, and changes nothing. Where memory does not suffice the pieces are halved,
        and where half precision overflows the loss is scaled down: the passes are made again, and nothing is skipped.

        Raises:
            torch.OutOfMemoryError: a single sample is too large.
        """
        while True:
            try:
                terms, found = self._passes(terms_of, batch, list(wanted), factor)
            except RuntimeError as error:
                if not should_reduce_batch_size(error) or not self._halve(batch):
                    raise
            else:
                shared = self._shared(terms, found, wanted)
                if shared is not None:
                    return shared
            clear_device_cache(garbage_collection=True)

    def split(self, batch: Any) -> list[tuple[Any, float]]:
        """The pieces of a batch and their shares of its samples; the same objects as long as the batch is in use."""
        if self.pieces == 1 and not isinstance(batch, Several):
            return [(batch, 1.0)]
        if id(batch) not in self._cut:
            while len(self._cut) > 1:  # no step reads more than two
                del self._cut[next(iter(self._cut))]
            parts = [p for one in together(batch) for p in divided(one, self.pieces)]
            sizes = [samples(part) for part in parts]
            known = [s for s in sizes if s is not None]
            total = sum(known) if len(known) == len(sizes) else 0
            shares = [s / total if s is not None and total else 1 / len(parts) for s in sizes]
            self._cut[id(batch)] = (batch, list(zip(parts, shares, strict=True)))
        return self._cut[id(batch)][1]

    def _passes(
        self, terms_of: Callable[[Any], Mapping[str, Tensor]], batch: Any, wanted: list[Tensor], factor: float
    ) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        terms: dict[str, Tensor] = {}
        total: list[Tensor | None] = [None] * len(wanted)
        pieces = self.split(batch)
        for piece, share in pieces:
            with self.autocast():
                here = terms_of(piece)
            loss = torch.stack([term.reshape(()) for term in here.values()]).sum()
            scaled = loss * (share * factor * self.scale) if share * factor * self.scale != 1 else loss
            found = _differentiated(scaled, wanted)
            if len(pieces) == 1:
                return {k: t.detach().reshape(()) for k, t in here.items()}, found
            for i, g in enumerate(found):
                kept = total[i]
                total[i] = g if kept is None else kept if g is None else kept.add_(g)
            terms = {k: terms.get(k, 0) + t.detach().reshape(()) * share for k, t in here.items()}
            del here, loss, scaled, found
        return terms, total

    def _shared(self, terms: dict[str, Tensor], found: list[Tensor | None], wanted: Sequence[Tensor]) -> Found | None:
        """Means over the processes; None if they overflow, and the loss can be scaled down."""
        idle = [g is None for g in found]
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(wanted, found, strict=True)]
        if world() > 1:  # all that is to be shared travels together
            flags = torch.tensor(idle, dtype=filled[0].dtype, device=filled[0].device)
            *means, flags = mean([*filled, *terms.values(), flags])
            idle = [flag == 1 for flag in flags.tolist()]
        else:
            means = [*filled, *terms.values()]
        gradients, values = means[: len(filled)], means[len(filled) :]
        if self.precision == "fp16":
            finite = bool(torch.stack(torch._foreach_norm(gradients, torch.inf)).isfinite().all())
            if not finite and self.scale > 1:
                self.scale, self.since = self.scale / 2, 0
                return None
            gradients = [g / self.scale for g in gradients]
            self.since += 1
            if self.since == GROWS_EVERY:
                self.scale, self.since = self.scale * 2, 0
        return Found(dict(zip(terms, values, strict=True)), gradients, idle)

    def _halve(self, batch: Any) -> bool:
        """Twice as many pieces, if the batch can be divided so."""
        most = max((samples(one) or 1) for one in together(batch))
        if self.pieces >= most:
            self.say(f"out of memory on {self.device}: even a single sample does not fit. Take smaller images")
            return False
        self.pieces *= 2
        self._cut.clear()
        self.say(
            f"out of memory on {self.device}: from here on each batch is run in {self.pieces} pieces, and their "
            "gradients are added up. Batch norms see a piece at a time"
        )
        return True


def _differentiated(loss: Tensor, wanted: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients; none of what a model has frozen, as mmdet's ResNets do when they are put into training mode."""
    living = [p for p in wanted if p.requires_grad]
    found = iter(torch.autograd.grad(loss, living, allow_unused=True))
    return [next(found) if p.requires_grad else None for p in wanted]


def together(batch: Any) -> list[Any]:
    """The batches of a step."""
    return batch.batches if isinstance(batch, Several) else [batch]


def samples(batch: Any) -> int | None:
    """How many samples a batch has; None where nobody can tell where they lie in it."""
    if lists := _lists(batch):
        return len(lists[0])
    lengths = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.ndim else None for leaf in pytree.tree_leaves(batch)}
    return lengths.pop() if len(lengths) == 1 else None


def divided(batch: Any, pieces: int) -> list[Any]:
    """A batch in so many parts, or as many as it has samples; whole where nobody can tell where they lie in it."""
    length = samples(batch)
    if length is None or pieces == 1 or length < 2:
        return [batch]
    size = -(-length // pieces)
    return [taken(batch, start, start + size) for start in range(0, length, size)]


def taken(batch: Any, start: int, end: int) -> Any:
    """Some of the samples of a batch, whose samples can be told apart."""
    if lists := _lists(batch):
        parts = [part[start:end] for part in lists]
        return dict(zip(batch, parts, strict=True)) if isinstance(batch, Mapping) else type(batch)(parts)
    return pytree.tree_map(lambda leaf: leaf[start:end], batch)


def _lists(batch: Any) -> list[Any]:
    """Lists of images and of targets, as detectors have them."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else list(batch) if type(batch) in (tuple, list) else []
    alike = len({len(part) if isinstance(part, (list, tuple)) else 0 for part in parts}) == 1
    images = [leaf for part in parts[:1] for leaf in (part if isinstance(part, (list, tuple)) else [])]
    return parts if alike and images and all(isinstance(i, Tensor) and i.ndim == 3 for i in images) else []
