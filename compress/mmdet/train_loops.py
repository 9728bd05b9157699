"""Training loops of mmengine's Runner that can be stopped at any iteration and resumed to the same bits.

mmengine's own loops resume at the beginning of an epoch, with other random numbers, without the validation that came
after the checkpoint, and from a file that is deleted before the next one is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmengine.dataset import InfiniteSampler
from mmengine.hooks import Hook
from mmengine.registry import LOOPS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from compress.data import BatchPosition, iterate_batches
from compress.distributed import all_gather_object, on_rank_zero
from compress.storage import RandomState, get_random_state
from compress.training import Engine

CHECKPOINT, PREVIOUS_CHECKPOINT, UNFINISHED_CHECKPOINT = "checkpoint.pth", "checkpoint.before.pth", "checkpoint.new.pth"


def find_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of a training, or None if there is none."""
    return next((path for name in (CHECKPOINT, PREVIOUS_CHECKPOINT) if (path := folder / name).exists()), None)


class ResumeHook(Hook):  # type: ignore[misc]
    """Writes checkpoints with the position in the data, the random state and the history; restores them.

    Args:
        folder: of the checkpoints; None writes none.
    """

    def __init__(self, engine: Engine, folder: Path | None) -> None:
        self.engine, self.folder = engine, folder
        self.position = BatchPosition(0, 0, 0.0)  # where the next reading starts
        self.random_states: list[RandomState] | None = None  # there, one per process; None: as the epoch's seed says
        self._saved: dict[str, Any] = {}  # position and random states of the next checkpoint

    def save_if_due(self, runner: Any, position: BatchPosition) -> None:
        """Write a checkpoint if it is time for one: all processes call this after the same iterations.

        Raises:
            KeyboardInterrupt, Terminated: a process was interrupted; the checkpoint is written.
        """
        accumulated = getattr(runner.optim_wrapper, "_accumulative_counts", 1)  # gradients are in no checkpoint
        if self.folder is None or runner.iter % accumulated or runner.iter % self.engine.look_every:
            return
        if not self.engine.checkpoint_is_due():
            return
        # At the beginning of an epoch its seed counts.
        random_states = all_gather_object(get_random_state()) if position.batches_read else None
        self._saved = {"position": position.to_dict(), "random": random_states}
        with self.engine.measured_save():
            meta = {"epoch": runner.epoch, "iter": runner.iter}
            runner.save_checkpoint(str(self.folder), UNFINISHED_CHECKPOINT, meta=meta)  # on rank 0
            on_rank_zero(self._publish)
        self.engine.stop_if_interrupted()

    def _publish(self) -> None:
        assert self.folder is not None
        new, current = self.folder / UNFINISHED_CHECKPOINT, self.folder / CHECKPOINT
        with new.open("rb+") as file:
            os.fsync(file.fileno())
        if current.exists():
            os.replace(current, self.folder / PREVIOUS_CHECKPOINT)
        os.replace(new, current)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Add the position, the random states of all processes and the history, as JSON."""
        if self._saved:  # a CheckpointHook of the config saves, too
            checkpoint["compress_resume"] = json.dumps({**self._saved, "history": self.engine.history})

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the position, the random states and the history."""
        values = json.loads(checkpoint["compress_resume"])
        self.position = BatchPosition.from_dict(values["position"])
        self.random_states, self.engine.history = values["random"], values["history"]

    def read(self, loader: Any, count: int) -> Iterator[tuple[BatchPosition, Any]]:
        """Yield `count` (position, batch) from the current position on."""
        start, random_states = self.position, self.random_states
        self.random_states = None
        yield from iterate_batches(loader, self.engine.seed, "finetune", count, start, random_states)


def _resume_hook(runner: Any) -> ResumeHook:
    return next(hook for hook in runner.hooks if isinstance(hook, ResumeHook))


class RestartedInfiniteSampler(InfiniteSampler):  # type: ignore[misc]
    """mmengine's infinite sampler, but every reading starts at the beginning of the order."""

    def __iter__(self) -> Iterator[int]:
        return self._indices_of_rank()  # type: ignore[no-any-return]


@LOOPS.register_module()
class ResumableEpochLoop(EpochBasedTrainLoop):  # type: ignore[misc]
    """mmengine's loop over epochs, resumable at any iteration."""

    def run(self) -> Any:
        """Train all epochs."""
        runner, hook = self.runner, _resume_hook(self.runner)
        runner.call_hook("before_train")
        while self._epoch < self._max_epochs and not self.stop_training:
            runner.call_hook("before_train_epoch")
            runner.model.train()
            length = len(self.dataloader)
            for position, batch in hook.read(self.dataloader, length - hook.position.batches_read):
                self.run_iter(position.batches_read - 1, batch)
                if position.batches_read < length:
                    hook.save_if_due(runner, position)
            runner.call_hook("after_train_epoch")
            self._epoch += 1
            hook.position = BatchPosition(self._epoch, 0, 0.0)
            self._decide_current_val_interval()
            is_due = self._epoch % self.val_interval == 0 or self._epoch == self._max_epochs
            if runner.val_loop is not None and self._epoch >= self.val_begin and is_due:
                runner.val_loop.run()
            hook.save_if_due(runner, hook.position)
        runner.call_hook("after_train")
        return runner.model


@LOOPS.register_module()
class ResumableIterLoop(IterBasedTrainLoop):  # type: ignore[misc]
    """mmengine's loop over iterations, resumable at any of them."""

    def run(self) -> Any:
        """Train all iterations."""
        runner, hook = self.runner, _resume_hook(self.runner)
        del self.dataloader_iterator  # has started workers
        runner.call_hook("before_train")
        runner.call_hook("before_train_epoch")
        left = self._max_iters - self._iter
        for position, batch in hook.read(self.dataloader, left) if left else ():
            if self.stop_training:
                break
            runner.model.train()
            self.run_iter(batch)
            self._decide_current_val_interval()
            is_due = self._iter % self.val_interval == 0 or self._iter == self._max_iters
            if runner.val_loop is not None and self._iter >= self.val_begin and is_due:
                runner.val_loop.run()
            hook.save_if_due(runner, position)
        runner.call_hook("after_train_epoch")
        runner.call_hook("after_train")
        return runner.model
