"""Engine: the device, the loop over batches, the clock, checkpoints. Search and fine-tuning run on it alike."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .checkpoint import State, Store, own_randomness, random_state, seed_all, set_random_state
from .display import Display
from .fields import Length
from .task import BatchError, Task
from .tracing import mode

SAVE_EVERY = 60.0  # seconds, and never more than a fiftieth of the time
POINTS = 200  # records of a stage in the history


class Diverged(RuntimeError):
    """The loss is no longer a number."""


class Engine:
    """Where things run, what they leave in the history, and how they go on after a stop."""

    def __init__(self, device: torch.device, seed: int, display: Display, store: Store | None = None) -> None:
        self.device, self.seed, self.display, self.store = device, seed, display, store
        self.history: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = {}
        self.facts: dict[str, Any] = {}  # what belongs into every checkpoint beside the state of the stage
        self.save_every = SAVE_EVERY
        self._saved, self._cost = time.monotonic(), 0.0

    def move(self, batch: Any) -> Any:
        """A batch on the device."""

        def put(value: Any) -> Any:
            return value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value

        return pytree.tree_map(put, batch)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens, and name the stage where it stops."""
        start = time.perf_counter()
        try:
            yield
        except KeyboardInterrupt:
            self.display.say(f"interrupted in stage {name}; {self.how_to_resume()}")
            raise
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0) + time.perf_counter() - start, 3)

    def how_to_resume(self) -> str:
        if self.store is None:
            return "nothing was kept, as there is no workdir"
        if not self.store.path.exists():
            return "nothing to resume yet: start again"
        return f"go on with resume=True (--resume) and the same workdir, {self.store.path.parent}"

    def save(self, state: State, facts: dict[str, Any]) -> None:
        """Write a checkpoint."""
        if self.store is None:
            return
        start = time.monotonic()
        everything = self.facts | facts | {"history": self.history, "seconds": self.seconds, "state": state.facts}
        self.store.save(state.tensors(), everything)
        self._saved = time.monotonic()
        self._cost = self._saved - start

    def train(
        self,
        name: str,
        loader: Iterable[Any],
        total: int,
        step: Callable[[Any], dict[str, Tensor]],
        state: State,
        *,
        at: dict[str, Any] | None = None,
        check: int = 0,
        measure: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        """Make `total` steps, from where a checkpoint left off (`at`); `measure` every `check` steps and at the end.

        Raises:
            Diverged: the loss is not finite.
            BatchError: the loader gives no batch, or ends too early.
        """
        done = at["done"] if at else 0
        sums: dict[str, float] = {}
        sums_of, interval = 0, max(1, total // POINTS)
        look = 1 if self.device.type == "cpu" else 10  # looking at a value stops the device
        with self.display.bar(name, total) as bar:
            bar.to(done)
            for place, batch in self._batches(name, loader, at, total - done):
                terms = step(self.move(batch))
                done += 1
                if done % look == 0 or done == total:
                    values = {key: float(value) for key, value in terms.items()}
                    self.check_finite(name, done, total, values)
                    sums = {k: sums.get(k, 0) + v for k, v in values.items()}
                    sums_of += 1
                    bar.to(done, values)
                if (done % interval == 0 or done == total) and sums_of:
                    record = {k: v / sums_of for k, v in sums.items()}
                    self.history.append(
                        {"stage": name, "step": done, "epoch": place["epoch"] + place["part"], **record}
                    )
                    sums, sums_of = {}, 0
                if measure and (done == total or (check and done % check == 0)):
                    found = {f"val_{k}": v for k, v in measure().items()}
                    self.history.append({"stage": name, "step": done, "epoch": place["epoch"] + place["part"], **found})
                if (
                    self.store
                    and done < total
                    and time.monotonic() - self._saved > max(self.save_every, 50 * self._cost)
                ):
                    self.save(state, {"done": done, **place, "random": random_state()})

    def evaluate(self, task: Task, model: nn.Module, name: str = "evaluate") -> dict[str, float]:
        """The task's measurements on its validation data, if it has any. Draws no random numbers of the run."""
        if (val := task.val) is None:
            return {}

        def moved() -> Iterator[Any]:
            with self.display.bar(name, length_of(val)) as bar:
                for batch in val:
                    yield self.move(batch)
                    bar.advance()

        with mode(model, training=False), torch.no_grad(), own_randomness(self.seed):
            return {key: float(value) for key, value in task.evaluate(model, moved()).items()}

    def _batches(
        self, name: str, loader: Iterable[Any], at: dict[str, Any] | None, count: int
    ) -> Iterator[tuple[dict[str, Any], Any]]:
        """Batches with their places; each epoch starts from a seed of its own, so that a resumed one is the same."""
        epoch, skip = (at["epoch"], at["inside"]) if at else (0, 0)
        size = length_of(loader)
        once = isinstance(loader, Iterator)
        while count > 0:
            seed_all(derived(self.seed, name, epoch))
            if isinstance(generator := getattr(loader, "generator", None), torch.Generator):
                generator.manual_seed(derived(self.seed, name, epoch))
            if hasattr(getattr(loader, "sampler", None), "set_epoch"):
                loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            inside = 0
            for batch in loader:
                inside += 1
                if inside <= skip:
                    continue
                if at and inside == skip + 1 and at.get("random"):
                    set_random_state(at["random"])
                    at = None
                part = inside / size if size else 0.0
                yield {"epoch": epoch, "inside": inside, "part": part}, batch
                count -= 1
                if count == 0:
                    return
            if inside == 0 or (once and count > 0):
                if inside == 0:
                    raise BatchError(f"{name}: expected at least one batch; the loader gave none")
                raise BatchError(
                    f"{name}: expected {count} steps' batches more; the iterator ended, and is read only once"
                )
            epoch, skip = epoch + 1, 0

    def check_finite(self, name: str, done: int, total: int, values: dict[str, float]) -> None:
        """
        Raises:
            Diverged: a term of the loss is not finite.
        """
        bad = {key: value for key, value in values.items() if not math.isfinite(value)}
        if bad:
            terms = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
            raise Diverged(
                f"{name}, step {done} of {total}: the loss is not finite ({terms}). Lower its lr, add warmup or "
                f"clip, or look for NaN in the data; {self.how_to_resume()}."
            )


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
                bar.advance()
    if not size:
        raise BatchError("train: expected at least one batch; the loader gave none")
    return length.steps(size)


def peek(loader: Iterable[Any], where: str) -> tuple[Any, Iterable[Any]]:
    """The first batch, and a loader that still gives it.

    Raises:
        BatchError: there is none.
    """
    reader = iter(loader)
    with own_randomness():
        try:
            first = next(reader)
        except StopIteration:
            raise BatchError(f"{where}: expected at least one batch; the loader gave none") from None
    return first, chain([first], loader) if isinstance(loader, Iterator) else loader


def pick_device(wanted: str | torch.device | None, model: nn.Module) -> torch.device:
    """What was asked for; else a GPU; else where the model is."""
    if wanted is not None:
        return torch.device(wanted)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return next((p.device for p in model.parameters()), torch.device("cpu"))
