"""Engine: the device, the loop over batches, the clock, checkpoints. Search and fine-tuning run on it alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .checkpoint import State, Store, own_randomness, random_state
from .display import Display
from .loading import batches, generators_kept, length_of
from .processes import agreed, rank
from .task import Task
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
        """A batch on the device, whatever holds its tensors: containers, mappings, or objects with a `to`."""

        def put(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(self.device, non_blocking=True)
            if isinstance(value, Mapping):
                return {key: self.move(part) for key, part in value.items()}
            return value.to(self.device) if callable(getattr(value, "to", None)) else value

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
        if self.store is None or rank():
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
        sums, count = (at["sums"], at["count"]) if at else ({}, 0)
        interval = max(1, total // POINTS)
        look = 1 if self.device.type == "cpu" else 10  # looking at a value stops the device
        with self.display.bar(name, total) as bar:
            bar.to(done)
            for place, batch in batches(loader, self.seed, name, total - done, at):
                terms = step(self.move(batch))
                done += 1
                due = self.store is not None and not rank() and done < total and self._due()
                if done % look == 0 or done == total or due:
                    values = {key: float(value) for key, value in terms.items()}
                    self.check_finite(name, done, total, values)
                    sums, count = {k: sums.get(k, 0) + v for k, v in values.items()}, count + 1
                    bar.to(done, values)
                where = {"stage": name, "step": done, "epoch": place["epoch"] + place["part"]}
                if (done % interval == 0 or done == total) and count:
                    self.history.append(where | {k: v / count for k, v in sums.items()})
                    sums, count = {}, 0
                if measure and (done == total or (check and done % check == 0)):
                    self.history.append(where | {f"val_{k}": v for k, v in measure().items()})
                if due:
                    facts = {"done": done, "sums": sums, "count": count, "random": random_state()}
                    self.save(state, facts | place)

    def _due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self._saved > max(self.save_every, 50 * self._cost)

    def evaluate(self, task: Task, model: nn.Module, name: str = "evaluate") -> dict[str, float]:
        """The task's measurements on its validation data, if it has any. Draws no random numbers of the run."""
        if (val := task.val) is None:
            return {}

        def moved() -> Iterator[Any]:
            with self.display.bar(name, length_of(val)) as bar:
                for batch in val:
                    yield self.move(batch)
                    bar.advance()

        with mode(model, training=False), torch.no_grad(), own_randomness(self.seed), generators_kept(val):
            return agreed({key: float(value) for key, value in task.evaluate(model, moved()).items()})

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
                "clip, or look for NaN in the data, and start anew (in another workdir, if there is one)."
            )


def pick_device(wanted: str | torch.device | None, model: nn.Module) -> torch.device:
    """What was asked for; else a GPU; else where the model is.

    Raises:
        ValueError: there is no such device here.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if wanted is None else None
    try:
        device = device or torch.device(wanted or "cpu")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {wanted}: not to be had here: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if wanted is not None or device.type == "cuda":
        return device
    return next((p.device for p in model.parameters()), torch.device("cpu"))
