"""Reading loaders: how long they are, their first batch, and their batches in an order that can be taken up again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from .checkpoint import own_randomness, seed_all, set_random_state
from .display import Display
from .fields import Length
from .processes import rank
from .task import BatchError, describe


def derived(seed: int, *names: object) -> int:
    """A seed for a purpose of its own."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def length_of(loader: Any) -> int | None:
    """How many batches a loader has, if it says so."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def steps_of(loader: Any, length: Length, where: str, display: Display) -> int:
    """A length in steps; a loader that does not say how long it is is counted.

    Raises:
        BatchError: it can be read only once, or has no batches.
    """
    if length.unit == "steps":
        return length.steps(None)
    size = length_of(loader)
    if size is None:
        if isinstance(loader, Iterator):
            raise BatchError(
                f"{where}: {length} of an iterator that can be read only once and has no length; "
                f'give a DataLoader, or say how long with "500 steps"'
            )
        with display.bar("counting the batches") as bar, own_randomness():
            size = 0
            for _ in loader:
                size += 1
                bar.advance('a stream without end needs "500 steps"' if size > 1000 else "")
    if not size:
        raise BatchError("train: expected at least one batch; the loader gave none")
    return length.steps(size)


def unlike(loader: Any, where: str) -> list[str]:
    """What is wrong with something that is to give batches and cannot."""
    if hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__"):
        return []
    hint = "Call it, if it makes one" if callable(loader) else "Give a torch.utils.data.DataLoader"
    return [f"{where}: expected a loader, which gives batches; got {describe(loader)}. {hint}"]


def peek(loader: Iterable[Any], where: str) -> tuple[Any, Iterable[Any]]:
    """The first batch, and a loader that still gives it.

    Raises:
        BatchError: there is none.
    """
    if wrong := unlike(loader, where):
        raise BatchError(wrong[0])
    with own_randomness(), generators_kept(loader):
        try:
            first = next(iter(loader))
        except StopIteration:
            raise BatchError(f"{where}: expected at least one batch; the loader gave none") from None
    return first, chain([first], loader) if isinstance(loader, Iterator) else loader


def samplers(loader: Any) -> list[Any]:
    """Everything that says in which order a loader reads."""
    found = []
    for part in getattr(loader, "parts", [loader]):  # of a pair of loaders
        outer: Any = getattr(part, "batch_sampler", None)
        inner: Any = getattr(outer, "batch_sampler", None)  # of one process's part of the batches
        found += [owner.sampler for owner in (part, outer, inner) if hasattr(owner, "sampler")]
        found += [owner for owner in (outer, inner) if owner is not None]
    return list({id(sampler): sampler for sampler in found}.values())


def generators(loader: Any) -> list[torch.Generator]:
    """Every generator that a loader and its samplers draw from."""
    owners = [*getattr(loader, "parts", [loader]), *samplers(loader)]
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


@contextmanager
def generators_kept(loader: Any) -> Iterator[None]:
    """A loader's own generators are put back as they were; a sampler that has none is lent one.

    So the order of the data does not depend on what else draws random numbers, and all processes shuffle alike.
    """
    before = [(generator, generator.get_state()) for generator in generators(loader)]
    bare = [sampler for sampler in samplers(loader) if getattr(sampler, "generator", loader) is None]
    for sampler in bare:
        sampler.generator = torch.Generator()
    try:
        yield
    finally:
        for sampler in bare:
            sampler.generator = None
        for generator, state in before:
            generator.set_state(state)


def seed_loader(loader: Any, seed: int, epoch: int) -> None:
    """Begin an epoch: what shuffles starts from this seed, what augments from one of this process's own."""
    seed_all(derived(seed, rank()) if rank() else seed)
    for generator in generators(loader):
        generator.manual_seed(seed)
    for sampler in samplers(loader):
        if callable(begin := getattr(sampler, "set_epoch", None)):
            begin(epoch)


def batches(
    loader: Iterable[Any], seed: int, name: str, count: int, at: dict[str, Any] | None = None
) -> Iterator[tuple[dict[str, Any], Any]]:
    """So many batches with their places, over as many epochs as it takes; from `at` on, if a run is taken up again.

    Each epoch starts from a seed of its own. A run that is taken up reads and drops what was used of its epoch, and
    then sets the random state that it had: what is drawn from there on is the same.

    Raises:
        BatchError: the loader gives no batch, or ends too early.
    """
    epoch, skip = (at["epoch"], at["inside"]) if at else (0, 0)
    size = length_of(loader)
    with generators_kept(loader):
        while True:
            seed_loader(loader, derived(seed, name, epoch), epoch)
            reader, inside = iter(loader), 0
            while inside < skip and next(reader, loader) is not loader:
                inside += 1
            if at:
                set_random_state(at["random"][rank()])
            at, skip = None, 0
            for batch in reader:
                inside += 1
                count -= 1
                yield {"epoch": epoch, "inside": inside, "part": inside / size if size else 0.0}, batch
                if count == 0:
                    return
            if inside == 0:
                raise BatchError(f"{name}: expected at least one batch; the loader gave none")
            if isinstance(loader, Iterator):
                raise BatchError(f"{name}: expected {count} batches more; the iterator ended, and is read only once")
            epoch += 1
