"""Engine: the training loop of search and fine-tuning, with history, timing, evaluation and checkpoints."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compress.data import AccumulatedBatch, iterate_batches, num_batches, reproducible_reading, shard_loader
from compress.distributed import (
    all_gather_object,
    broadcast_object,
    init_process_group,
    on_rank_zero,
    rank,
    sum_numbers,
    world_size,
)
from compress.errors import BudgetError, Diverged
from compress.modules import module_mode
from compress.progress import ProgressDisplay
from compress.recipe import EngineConfig
from compress.storage import CheckpointStore, TrainingState, get_random_state, isolated_random_state

from .gradients import GradientComputer
from .interruption import Interruption, Terminated
from .run_state import CheckpointMetadata, LoopPosition, RunState
from .task import Task, check_metrics

SAVE_INTERVAL = 60.0  # seconds between checkpoints
MIN_SAVE_RATIO = 50  # and at least this many times the seconds that writing one takes
HISTORY_POINTS = 200  # records of a stage in the history
INTERRUPT_NOTICE = b"\ninterrupted: a checkpoint is written after this step; Ctrl-C again stops at once\n"
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
        self.batches_per_step = self.config.batches_per_step  # of each process
        self.gradient_computer = GradientComputer(device, self.config.effective_precision, display.message)
        self.trackers: list[Any] = []
        self.history: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = {}  # by stage
        self.run_state = RunState()
        self.save_interval = SAVE_INTERVAL
        self.location = ""  # inside a training loop, for messages
        self._last_save, self._save_seconds = time.monotonic(), 0.0
        self._interruption = Interruption(self._announce_interruption)

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
        except (KeyboardInterrupt, Terminated):
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
        metadata = CheckpointMetadata(
            self.run_state, self.history, self.seconds, state.values, self.gradient_computer.state, position
        )
        with self.measured_save():
            tensors = state.tensors()  # on all processes: they gather those that are sharded
            on_rank_zero(lambda: store.save(tensors, metadata.to_dict()))

    @contextmanager
    def measured_save(self) -> Iterator[None]:
        """Measure the block, which writes a checkpoint: its duration decides when the next one is due."""
        start = time.monotonic()
        yield
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
        """Train for `total` steps; record losses, and write checkpoints from time to time and when interrupted.

        Args:
            name: of the stage.
            step: trains on one batch and returns the terms of the loss.
            state: what a checkpoint has to hold.
            resume_at: position of the checkpoint to continue from.
            measure: evaluates, every `measure_every` steps and at the end.

        Raises:
            Diverged: the loss is not finite.
            BatchError: the loader gives no batch, or ends too early.
            KeyboardInterrupt, Terminated: a process was interrupted; the checkpoint is written.
        """
        done = resume_at.done if resume_at else 0
        sums, count = (resume_at.sums, resume_at.count) if resume_at else ({}, 0)
        start = (resume_at.batches, resume_at.random_states) if resume_at else ()
        interval = max(1, total // HISTORY_POINTS)
        with self.display.bar(name, total) as bar, self.gradient_computer.training(), self.deferred_interrupts():
            bar.update(done)
            for position, batch in iterate_batches(loader, self.seed, name, total - done, *start):
                terms = step(self.move(batch))
                done += 1
                self.location = f", after step {done} of {total}"
                look = done % self.look_every == 0 or done == total
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
                if self.store is not None and (
                    self._interrupted_by()  # behind the last step nothing but an interruption is saved
                    if done == total
                    else self._is_interrupted_alone() or (look and self.checkpoint_is_due())
                ):
                    if broadcast_object(state.is_finite()):
                        random_states = all_gather_object(get_random_state())
                        per_step = self.batches_per_step * world_size()
                        self.save(state, LoopPosition(done, position, sums, count, random_states, total, per_step))
                    self.stop_if_interrupted()

    @property
    def look_every(self) -> int:
        """Steps between two looks at values on the device."""
        return 1 if self.device.type == "cpu" else LOOK_EVERY

    def checkpoint_is_due(self) -> bool:
        """Return whether it is time for a checkpoint, as rank 0 decides, or a process was interrupted."""
        since = time.monotonic() - self._last_save
        is_time = rank() == 0 and since > max(self.save_interval, MIN_SAVE_RATIO * self._save_seconds)
        return sum_numbers([is_time or self._interruption.signal > 0]) != [0]

    def deferred_interrupts(self) -> AbstractContextManager[None]:
        """Let Ctrl-C and SIGTERM wait for `stop_if_interrupted` during the block; not without a working directory."""
        return nullcontext() if self.store is None else self._interruption.deferred()

    def stop_if_interrupted(self) -> None:
        """End the run on all processes if one was interrupted: call this behind each checkpoint of a loop.

        Raises:
            KeyboardInterrupt, Terminated: a process was interrupted.
        """
        if number := self._interrupted_by():
            self._interruption.deliver(number)

    def _interrupted_by(self) -> int:
        """Return the signal that one of the processes has received, the same on all of them; 0 if none has."""
        return max(all_gather_object(self._interruption.signal))

    def _is_interrupted_alone(self) -> bool:
        return world_size() == 1 and self._interruption.signal > 0

    def _announce_interruption(self) -> None:
        if self.display.mode in ("auto", "plain"):
            with suppress(OSError):  # in a signal handler, where the streams of Python may be in use
                os.write(2, INTERRUPT_NOTICE)

    def evaluate(
        self, task: Task, model: nn.Module, name: str = "evaluate", data: Iterable[Any] | None = None
    ) -> dict[str, float]:
        """Return the task's metrics on a loader; empty if there is none. The random state of the run is not changed.

        Args:
            name: of the progress bar.
            data: default: the task's validation data.

        Raises:
            TypeError: `task.evaluate` does not return a dict of numbers by name.
        """
        data = task.val if data is None else data
        if data is None:
            return {}
        loader = shard_loader(data, even_batches=False) if task.sums_over_processes else data

        def batches() -> Iterator[Any]:
            with self.display.bar(name, num_batches(loader)) as bar:
                for batch in loader:
                    yield self.move(batch)
                    bar.advance()

        with (
            module_mode(model, training=False),
            torch.no_grad(),
            isolated_random_state(self.seed),
            reproducible_reading(loader),
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
