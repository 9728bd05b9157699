"""Engine: the training loop of search and fine-tuning, with history, timing, evaluation and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compress.data import AccumulatedBatch, iterate_batches, num_batches, reproducible_reading, shard_loader
from compress.distributed import all_gather_object, broadcast_object, init_process_group, on_rank_zero
from compress.errors import BudgetError, Diverged
from compress.modules import module_mode
from compress.progress import ProgressDisplay
from compress.recipe import EngineConfig
from compress.storage import CheckpointStore, TrainingState, get_random_state, isolated_random_state

from .classification import Classification
from .gradients import GradientComputer
from .run_state import CheckpointMetadata, LoopPosition, RunState
from .task import Task, check_metrics

SAVE_INTERVAL = 60.0  # seconds between checkpoints
MIN_SAVE_RATIO = 50  # and at least this many times the seconds that writing one takes
HISTORY_POINTS = 200  # records of a stage in the history
LOOK_EVERY = 10  # steps between two looks at the loss on a GPU: each waits for the device


class Engine:
    """Run training loops on a device; keep history, timings and run state; write checkpoints.

    Args:
        store: checkpoints of the working directory; None if there is none.
        config: section `engine` of the recipe.
    """

    def __init__(
        self,
        device: torch.device,
        seed: int,
        display: ProgressDisplay,
        store: CheckpointStore | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.device, self.seed, self.display, self.store = device, seed, display, store
        self.config = config or EngineConfig()
        self.gradient_computer = GradientComputer(device, self.config.effective_precision, display.message)
        self.trackers: list[Any] = []
        self.history: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = {}  # by stage
        self.run_state = RunState()
        self.save_interval = SAVE_INTERVAL
        self.location = ""  # inside a training loop, for messages
        self._last_save, self._save_seconds = time.monotonic(), 0.0

    def move(self, batch: Any) -> Any:
        """Return a batch on the device: tensors in containers and mappings, and objects with a method `to`."""

        def move_leaf(value: Any) -> Any:
            if isinstance(value, Tensor):
                channels_last = self.config.channels_last and value.ndim == 4
                memory_format = torch.channels_last if channels_last else torch.preserve_format
                return value.to(self.device, non_blocking=True, memory_format=memory_format)
            if isinstance(value, AccumulatedBatch):
                return AccumulatedBatch([self.move(one) for one in value.batches])
            if isinstance(value, Mapping):
                return {key: self.move(part) for key, part in value.items()}
            return value.to(self.device) if callable(getattr(value, "to", None)) else value

        return pytree.tree_map(move_leaf, batch)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage; name the stage and how to resume in errors."""
        start = time.perf_counter()
        try:
            yield
        except KeyboardInterrupt:
            self.display.message(f"interrupted in stage {name}; {self.resume_hint()}")
            raise
        except (Diverged, BudgetError):
            raise
        except Exception as error:
            self._note(error, f"stopped in stage {name}{self.location}; {self.resume_hint()}")
            raise
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0) + time.perf_counter() - start, 3)
            self.location = ""

    @contextmanager
    def explain_write_errors(self) -> Iterator[None]:
        """Add how to resume to errors of writing files outside the stages."""
        try:
            yield
        except OSError as error:
            if not getattr(error, "__notes__", None):
                self._note(error, self.resume_hint())
            raise

    def _note(self, error: Exception, text: str) -> None:
        error.add_note(text) if hasattr(error, "add_note") else self.display.message(text)

    def resume_hint(self) -> str:
        """Return how to continue after the run stopped."""
        if self.store is None:
            return "nothing was saved because there is no workdir"
        if self.store.is_empty:
            return "nothing to resume yet: start again"
        return f"continue with resume=True (--resume) and the same workdir, {self.store.path.parent}"

    def save(self, state: TrainingState, position: LoopPosition | None = None) -> None:
        """Write a checkpoint on rank 0; the other processes wait. Does nothing without a working directory."""
        store = self.store
        if store is None:
            return
        start = time.monotonic()
        metadata = CheckpointMetadata(
            self.run_state, self.history, self.seconds, state.values, self.gradient_computer.state, position
        )
        on_rank_zero(lambda: store.save(state.tensors(), metadata.to_dict()))
        self._last_save = time.monotonic()
        self._save_seconds = self._last_save - start

    def restore_(self, metadata: CheckpointMetadata) -> None:
        """Continue with the state, history and timings of a checkpoint."""
        self.run_state, self.history, self.seconds = metadata.run_state, metadata.history, metadata.seconds
        self.gradient_computer.restore_(metadata.gradients)

    def record(self, where: dict[str, Any], values: dict[str, float]) -> None:
        """Append measured values to the history, and pass them to the trackers.

        Args:
            where: stage, step and epoch.
        """
        self.history.append(where | values)
        if self.display.mode == "json":
            self.display.json_line(where | values)
        for tracker in self.trackers:
            tracker.log({f"{where['stage']}/{key}": value for key, value in values.items()}, step=where["step"])

    def train(
        self,
        name: str,
        loader: Iterable[Any],
        total: int,
        step: Callable[[Any], dict[str, Tensor]],
        state: TrainingState,
        *,
        resume_at: LoopPosition | None = None,
        measure_every: int = 0,
        measure: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        """Train for `total` steps; record losses, and write checkpoints from time to time.

        Args:
            name: of the stage.
            step: trains on one batch and returns the terms of the loss.
            state: what a checkpoint has to hold.
            resume_at: position of the checkpoint to continue from.
            measure: evaluates, every `measure_every` steps and at the end.

        Raises:
            Diverged: the loss is not finite.
            BatchError: the loader gives no batch, or ends too early.
        """
        done = resume_at.done if resume_at else 0
        sums, count = (resume_at.sums, resume_at.count) if resume_at else ({}, 0)
        start = (resume_at.batches, resume_at.random_states) if resume_at else ()
        interval = max(1, total // HISTORY_POINTS)
        look_every = 1 if self.device.type == "cpu" else LOOK_EVERY
        with self.display.bar(name, total) as bar:
            bar.update(done)
            for position, batch in iterate_batches(loader, self.seed, name, total - done, *start):
                terms = step(self.move(batch))
                done += 1
                self.location = f", after step {done} of {total}"
                look = done % look_every == 0 or done == total
                due = self.store is not None and look and done < total and self._checkpoint_is_due()
                if look:
                    values = {key: float(value) for key, value in terms.items()}
                    self.check_finite(name, done, total, values)
                    sums, count = {k: sums.get(k, 0) + v for k, v in values.items()}, count + 1
                    bar.update(done, values)
                where = {"stage": name, "step": done, "epoch": position.epoch + position.fraction}
                if (done % interval == 0 or done == total) and count:
                    self.record(where, {k: v / count for k, v in sums.items()})
                    sums, count = {}, 0
                if measure and (done == total or (measure_every and done % measure_every == 0)):
                    self.record(where, {f"val_{k}": v for k, v in measure().items()})
                if due and broadcast_object(state.is_finite()):
                    random_states = all_gather_object(get_random_state())
                    self.save(state, LoopPosition(done, position, sums, count, random_states))

    def _checkpoint_is_due(self) -> bool:
        """Return whether it is time for a checkpoint, as rank 0 decides."""
        return broadcast_object(
            time.monotonic() - self._last_save > max(self.save_interval, MIN_SAVE_RATIO * self._save_seconds)
        )

    def evaluate(self, task: Task, model: nn.Module, name: str = "evaluate") -> dict[str, float]:
        """Return the task's metrics on its validation data; empty if it has none.

        The random state of the run is not changed.

        Raises:
            TypeError: `task.evaluate` does not return a dict of numbers by name.
        """
        if task.val is None:
            return {}
        val = shard_loader(task.val, even_batches=False) if isinstance(task, Classification) else task.val

        def batches() -> Iterator[Any]:
            with self.display.bar(name, num_batches(val)) as bar:
                for batch in val:
                    yield self.move(batch)
                    bar.advance()

        with (
            module_mode(model, training=False),
            torch.no_grad(),
            isolated_random_state(self.seed),
            reproducible_reading(val),
        ):
            return broadcast_object(check_metrics(task.evaluate(model, batches()), task))

    def check_finite(self, name: str, done: int, total: int, values: dict[str, float]) -> None:
        """Check the terms of the loss.

        Raises:
            Diverged: a term is not finite.
        """
        if not all(math.isfinite(value) for value in values.values()):
            terms = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
            has_checkpoint = self.store is not None and self.store.path.exists()
            raise Diverged(
                f"{name}, step {done} of {total}: the loss is not finite ({terms}). Lower its lr, add warmup or "
                "clip, or look for NaN in the data, and start again (in another workdir, if you use one)."
                + (f" If it was the data: repair them, and {self.resume_hint()}" if has_checkpoint else "")
            )


def pick_device(requested: str | torch.device | None, model: nn.Module) -> torch.device:
    """Return the requested device; else a GPU, one per process; else the device of the model.

    Raises:
        ValueError: there is no such device.
    """
    try:
        device = (
            torch.device("cuda" if torch.cuda.is_available() else "cpu")
            if requested is None
            else torch.device(requested)
        )
        process_device = init_process_group(cpu=device.type == "cpu")
        if requested is None and process_device is not None:
            return process_device
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {requested}: not available: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if requested is not None or device.type == "cuda":
        return device
    return next((p.device for p in model.parameters()), torch.device("cpu"))
