"""Reading loaders: their length, their first batch, and batches in a reproducible order that can be resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from compress.distributed import rank
from compress.errors import BatchError
from compress.formatting import describe_value
from compress.progress import ProgressDisplay
from compress.recipe import Length
from compress.storage import RandomState, isolated_random_state, seed_all, set_random_state

WRAPPED_LOADER = ("loader", "dataloader", "data_loader", "base_dataloader")  # attributes of wrappers
MOST_WRAPPERS = 100  # objects that make up their attributes have no end


def derive_seed(seed: int, *names: object) -> int:
    """Return a seed for one purpose, such as an epoch of a stage, derived from the seed of the run."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def num_batches(loader: Any) -> int | None:
    """Return the number of batches of a loader, or None if it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def count_steps(loader: Any, length: Length, where: str, display: ProgressDisplay) -> int:
    """Return a length in steps; read a loader without a length once to count its batches.

    Raises:
        BatchError: the loader is an iterator without a length, or has no batches.
    """
    if length.unit == "steps":
        return length.steps(None)
    size = num_batches(loader)
    if size is None:
        if isinstance(loader, Iterator):
            raise BatchError(
                f"{where}: {length} of an iterator that can be read only once and has no length; "
                f'give a DataLoader, or a length such as "500 steps"'
            )
        with display.bar("counting the batches") as bar, isolated_random_state():
            size = 0
            for _ in loader:
                size += 1
                bar.advance('an endless stream needs a length such as "500 steps"' if size > 1000 else "")
    if not size:
        raise BatchError("train: expected at least one batch; the loader gave none")
    return length.steps(size)


def loader_problems(loader: Any, where: str) -> list[str]:
    """Return a message if an object cannot be iterated over for batches; else nothing."""
    if hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__"):
        return []
    hint = "Call it, if it returns a loader" if callable(loader) else "Give a torch.utils.data.DataLoader"
    return [f"{where}: expected a loader that gives batches; got {describe_value(loader)}. {hint}"]


def peek_first_batch(loader: Iterable[Any], where: str) -> tuple[Any, Iterable[Any]]:
    """Return the first batch, and a loader that still gives it.

    Raises:
        BatchError: the loader gives no batch, or is no loader.
    """
    if problems := loader_problems(loader, where):
        raise BatchError(problems[0])
    with isolated_random_state(), reproducible_reading(loader):
        try:
            first = next(iter(loader))
        except StopIteration:
            raise BatchError(f"{where}: expected at least one batch; the loader gave none") from None
    return first, chain([first], loader) if isinstance(loader, Iterator) else loader


def loader_parts(loader: Any) -> list[Any]:
    """Return the loaders that a combined loader, such as `PairedLoader`, reads from; else the loader itself."""
    parts: list[Any] = getattr(loader, "parts", [loader])
    return parts


def _samplers_of(loader: Any) -> list[Any]:
    """Return the samplers and batch samplers that order a loader."""
    samplers = []
    for part in loader_parts(loader):
        outer: Any = getattr(part, "batch_sampler", None)
        inner: Any = getattr(outer, "batch_sampler", None)  # inside a BatchSamplerShard
        samplers += [owner.sampler for owner in (part, outer, inner) if hasattr(owner, "sampler")]
        samplers += [owner for owner in (outer, inner) if owner is not None]
    return list({id(sampler): sampler for sampler in samplers}.values())


def _generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers draw from."""
    owners = [*loader_parts(loader), *_samplers_of(loader)]
    candidates = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in candidates if isinstance(g, torch.Generator)}.values())


def _data_loaders_in(loader: Any) -> list[DataLoader[Any]]:
    """Return the DataLoaders that a loader reads from, also those inside wrappers such as timm's PrefetchLoader."""
    loaders: dict[int, DataLoader[Any]] = {}
    remaining = loader_parts(loader)[:]
    seen: set[int] = set()
    while remaining:
        part = remaining.pop()
        if part is None or id(part) in seen or len(seen) == MOST_WRAPPERS:
            continue
        seen.add(id(part))
        if isinstance(part, DataLoader):
            loaders[id(part)] = part
        remaining += [getattr(part, name, None) for name in WRAPPED_LOADER]
    return list(loaders.values())


def resume_limits(loader: Any, where: str) -> list[str]:
    """Return why a run that is resumed on a loader, of which a batch was read, would not end with the same bits."""
    return [
        f"{where}: the workers of {type(part).__name__} live on from epoch to epoch and cannot be seeded. If they draw "
        "random numbers, a run that is stopped and resumed ends with other weights than one that is not. A plain "
        "torch.utils.data.DataLoader does not have this limit"
        for part in _data_loaders_in(loader)
        if part.num_workers and any(isinstance(v, _BaseDataLoaderIter) for k, v in vars(part).items() if k[0] != "_")
    ]


@contextmanager
def _new_workers_at_each_epoch(loader: Any) -> Iterator[None]:
    """Start new workers at each epoch during the block: living ones go on with the random state of the last epoch."""
    persistent = [part for part in _data_loaders_in(loader) if part.persistent_workers]
    for part in persistent:
        vars(part)["persistent_workers"] = False  # past __setattr__, which refuses; the user's own workers live on
    try:
        yield
    finally:
        for part in persistent:
            vars(part)["persistent_workers"] = True


@contextmanager
def reproducible_reading(loader: Any) -> Iterator[None]:
    """Read a loader in the block so that its batches depend on nothing but the seed at the beginning of an epoch.

    Its generators are restored after the block; samplers without a generator get one for the block. So the order of
    the data does not depend on other random draws, and all processes shuffle in the same order. Workers do not live on
    from epoch to epoch.
    """
    before = [(generator, generator.get_state()) for generator in _generators_of(loader)]
    without_generator = [sampler for sampler in _samplers_of(loader) if getattr(sampler, "generator", loader) is None]
    for sampler in without_generator:
        sampler.generator = torch.Generator()
    try:
        with _new_workers_at_each_epoch(loader):
            yield
    finally:
        for sampler in without_generator:
            sampler.generator = None
        for generator, state in before:
            generator.set_state(state)


def seed_loader(loader: Any, seed: int, epoch: int) -> None:
    """Begin an epoch: seed shuffling the same on all processes, and augmentation differently on each."""
    seed_all(derive_seed(seed, rank()) if rank() else seed)
    for generator in _generators_of(loader):
        generator.manual_seed(seed)
    for sampler in _samplers_of(loader):
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)


class BatchPosition(NamedTuple):
    """Position in a loader after a batch was read."""

    epoch: int
    batches_read: int  # of this epoch
    fraction: float  # of this epoch; 0 if the loader has no length

    def to_dict(self) -> dict[str, Any]:
        """Return the position under the keys of a checkpoint."""
        return {"epoch": self.epoch, "inside": self.batches_read, "part": self.fraction}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BatchPosition:
        """Read the position from the values of a checkpoint."""
        return cls(values["epoch"], values["inside"], values["part"])


def iterate_batches(
    loader: Iterable[Any],
    seed: int,
    name: str,
    count: int,
    resume_at: BatchPosition | None = None,
    random_states: Sequence[RandomState] | None = None,
) -> Iterator[tuple[BatchPosition, Any]]:
    """Yield (position, batch) `count` times, cycling over epochs.

    Each epoch starts from its own seed. A resumed loop skips the batches of its epoch that were read before, then
    restores the random state, so that all later draws are the same.

    Args:
        name: of the stage; part of the seed, and named in errors.
        resume_at: position after which to continue.
        random_states: state of each process at that position; there may be fewer or more processes now.

    Raises:
        BatchError: the loader gives no batch, or ends too early.
    """
    epoch, skip = (resume_at.epoch, resume_at.batches_read) if resume_at else (0, 0)
    size = num_batches(loader)
    if count == 0:  # the loop was stopped behind its last step
        if random_states and rank() < len(random_states):
            set_random_state(random_states[rank()])
        return
    with reproducible_reading(loader):
        while True:
            seed_loader(loader, derive_seed(seed, name, epoch), epoch)
            reader, batches_read = iter(loader), 0
            while batches_read < skip and next(reader, loader) is not loader:
                batches_read += 1
            if random_states and rank() < len(random_states):  # else the process is new: the epoch's seed counts
                set_random_state(random_states[rank()])
            random_states, skip = None, 0
            for batch in reader:
                batches_read += 1
                count -= 1
                yield BatchPosition(epoch, batches_read, batches_read / size if size else 0.0), batch
                if count == 0:
                    return
            if batches_read == 0:
                raise BatchError(f"{name}: expected at least one batch; the loader gave none")
            if isinstance(loader, Iterator):
                raise BatchError(
                    f"{name}: expected {count} more batches; the iterator ended and can be read only once. Give a "
                    "loader that starts again, such as a DataLoader or list(data), or ask for fewer steps"
                )
            epoch += 1
