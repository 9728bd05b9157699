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

from .budget import BudgetError
from .checkpoint import State, Store, own_randomness, random_state
from .compute import Compute, EngineConfig, Several
from .display import Display
from .loading import batches, generators_kept, length_of
from .processes import agreed, everyone, first, join
from .share import shared
from .task import Classification, Task, checked
from .tracing import mode

SAVE_EVERY = 60.0  # seconds, and never more than a fiftieth of the time
POINTS = 200  # records of a stage in the history


class Diverged(RuntimeError):
    """The loss is no longer a number."""


class Engine:
    """Where things run, what they leave in the history, and how they go on after a stop."""

    def __init__(
        self,
        device: torch.device,
        seed: int,
        display: Display,
        store: Store | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.device, self.seed, self.display, self.store = device, seed, display, store
        self.config = config or EngineConfig()
        self.compute = Compute(device, self.config.passes, display.say)
        self.trackers: list[Any] = []
        self.history: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = {}
        self.facts: dict[str, Any] = {}  # what belongs into every checkpoint beside the state of the stage
        self.save_every = SAVE_EVERY
        self.where = ""  # in a training
        self._saved, self._cost = time.monotonic(), 0.0

    def move(self, batch: Any) -> Any:
        """A batch on the device, whatever holds its tensors: containers, mappings, or objects with a `to`."""

        def put(value: Any) -> Any:
            if isinstance(value, Tensor):
                last = self.config.channels_last and value.ndim == 4
                form = torch.channels_last if last else torch.preserve_format
                return value.to(self.device, non_blocking=True, memory_format=form)
            if isinstance(value, Several):
                return Several([self.move(one) for one in value.batches])
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
        except (Diverged, BudgetError):
            raise
        except Exception as error:
            self._note(error, f"stopped in stage {name}{self.where}; {self.how_to_resume()}")
            raise
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0) + time.perf_counter() - start, 3)
            self.where = ""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say how to go on where a file cannot be written between two stages or behind them."""
        try:
            yield
        except OSError as error:
            if not getattr(error, "__notes__", None):
                self._note(error, self.how_to_resume())
            raise

    def _note(self, error: Exception, text: str) -> None:
        error.add_note(text) if hasattr(error, "add_note") else self.display.say(text)

    def how_to_resume(self) -> str:
        if self.store is None:
            return "nothing was kept, as there is no workdir"
        if self.store.empty:
            return "nothing to resume yet: start again"
        return f"go on with resume=True (--resume) and the same workdir, {self.store.path.parent}"

    def save(self, state: State, facts: dict[str, Any]) -> None:
        """Write a checkpoint: the first process does, the others wait."""
        store = self.store
        if store is None:
            return
        start = time.monotonic()
        everything = self.facts | facts | {"history": self.history, "seconds": self.seconds, "state": state.facts}
        everything |= {"compute": self.compute.facts}
        first(lambda: store.save(state.tensors(), everything))
        self._saved = time.monotonic()
        self._cost = self._saved - start

    def record(self, where: dict[str, Any], values: dict[str, float]) -> None:
        """Write something that was measured into the history, and wherever it is tracked."""
        self.history.append(where | values)
        if self.display.form == "json":
            self.display.tell(where | values)
        for tracker in self.trackers:
            tracker.log({f"{where['stage']}/{key}": value for key, value in values.items()}, step=where["step"])

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
                self.where = f", behind step {done} of {total}"
                looks = done % look == 0 or done == total
                due = self.store is not None and looks and done < total and self._due()
                if looks:
                    values = {key: float(value) for key, value in terms.items()}
                    self.check_finite(name, done, total, values)
                    sums, count = {k: sums.get(k, 0) + v for k, v in values.items()}, count + 1
                    bar.to(done, values)
                where = {"stage": name, "step": done, "epoch": place["epoch"] + place["part"]}
                if (done % interval == 0 or done == total) and count:
                    self.record(where, {k: v / count for k, v in sums.items()})
                    sums, count = {}, 0
                if measure and (done == total or (check and done % check == 0)):
                    self.record(where, {f"val_{k}": v for k, v in measure().items()})
                if due and agreed(state.sound()):
                    facts = {"done": done, "sums": sums, "count": count, "random": everyone(random_state())}
                    self.save(state, facts | place)

    def _due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return agreed(time.monotonic() - self._saved > max(self.save_every, 50 * self._cost))

    def evaluate(self, task: Task, model: nn.Module, name: str = "evaluate") -> dict[str, float]:
        """The task's measurements on its validation data, if it has any. Draws no random numbers of the run.

        Raises:
            TypeError: they are something else than numbers by name.
        """
        if task.val is None:
            return {}
        val = shared(task.val, even=False) if isinstance(task, Classification) else task.val

        def moved() -> Iterator[Any]:
            with self.display.bar(name, length_of(val)) as bar:
                for batch in val:
                    yield self.move(batch)
                    bar.advance()

        with mode(model, training=False), torch.no_grad(), own_randomness(self.seed), generators_kept(val):
            return agreed(checked(task.evaluate(model, moved()), task))

    def check_finite(self, name: str, done: int, total: int, values: dict[str, float]) -> None:
        """
        Raises:
            Diverged: a term of the loss is not finite.
        """
        bad = {key: value for key, value in values.items() if not math.isfinite(value)}
        if bad:
            terms = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
            kept = self.store is not None and self.store.path.exists()
            raise Diverged(
                f"{name}, step {done} of {total}: the loss is not finite ({terms}). Lower its lr, add warmup or "
                "clip, or look for NaN in the data, and start anew (in another workdir, if there is one)."
                + (f" Where it was the data: mend them, and {self.how_to_resume()}" if kept else "")
            )


def pick_device(wanted: str | torch.device | None, model: nn.Module) -> torch.device:
    """What was asked for; else a GPU, of several processes each its own; else where the model is.

    Raises:
        ValueError: there is no such device here.
    """
    try:
        device = (
            torch.device("cuda" if torch.cuda.is_available() else "cpu") if wanted is None else torch.device(wanted)
        )
        own = join(cpu=device.type == "cpu")
        if wanted is None and own is not None:
            return own
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {wanted}: not to be had here: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if wanted is not None or device.type == "cuda":
        return device
    return next((p.device for p in model.parameters()), torch.device("cpu"))
