"""Ctrl-C and SIGTERM write a checkpoint behind the current step; the resumed run ends with the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import compress
from compress.storage.checkpoint import CheckpointStore
from compress.training import interruption
from compress.training.interruption import Interruption, Terminated
from helpers.digits import dense
from helpers.interruption import SHORT_RECIPE, small_loaders
from helpers.weights import same_weights

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX systems")
TESTS = Path(__file__).parents[1]
HANDLED = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def default_handlers() -> Any:
    """The handlers of a fresh process: a shell's background jobs ignore SIGINT."""
    before = [signal.getsignal(number) for number in HANDLED]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert [signal.getsignal(number) for number in HANDLED] == [signal.default_int_handler, signal.SIG_DFL]
    for number, handler in zip(HANDLED, before, strict=True):
        signal.signal(number, handler)


class SignallingLoader:
    """A loader that sends signals to its own process before the n-th batch, counted over all epochs and stages."""

    def __init__(self, loader: DataLoader[Any], after: int, act: Callable[[], None]) -> None:
        self.loader, self.left, self.act = loader, after, act
        self.batch_sampler = loader.batch_sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        for batch in self.loader:
            if self.left == 0:
                self.act()
            self.left -= 1
            yield batch


def prune(after: int, act: Callable[[], None], workdir: Path | None, **settings: Any) -> compress.Pruned:
    train, val = small_loaders()
    loader = SignallingLoader(train, after, act)
    return compress.prune(dense(), SHORT_RECIPE, train=loader, val=val, workdir=workdir, **{"quiet": True} | settings)


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def position(workdir: Path) -> tuple[str, int]:
    """Return stage and step of the last checkpoint."""
    found = CheckpointStore(workdir).load()
    assert found is not None
    return found[1]["stage"], found[1]["done"]


@pytest.mark.parametrize("number", HANDLED)
@pytest.mark.parametrize(
    ("after", "where"),
    [(1, ("search", 1)), (4, ("search", 4)), (6, ("search", 6)), (10, ("finetune", 4)), (14, ("finetune", 8))],
)
def test_interrupted_run_is_saved_behind_the_step_and_resumes_to_the_same_bits(
    number: int, after: int, where: tuple[str, int], undisturbed: compress.Pruned, tmp_path: Path
) -> None:
    """No checkpoint is due within the minute of the run; one batch is read before 6 and 8 steps."""
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Terminated) as ended:
        prune(after, send(number), tmp_path)
    assert number == signal.SIGINT or ended.value.code == 143  # type: ignore[attr-defined]
    assert position(tmp_path) == where
    train, val = small_loaders()
    again = compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    assert same_weights(again.model, undisturbed.model)
    assert again.report.history == undisturbed.report.history
    assert again.report.pruned.metrics == undisturbed.report.pruned.metrics


PROGRAM = """
import os, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
import torch
torch.set_num_threads(1)
from training.test_interruption import augmented_run
augmented_run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
"""


def augmented_run(workdir: Path, after: int, number: int) -> None:
    """Send a signal to this process and the workers of its loader, as a terminal does."""
    from contracts.test_resume import augmented

    def to_all() -> None:
        os.killpg(os.getpgrp(), number)

    loader = SignallingLoader(augmented(1), after, to_all if number else lambda: None)
    compress.prune(dense(), SHORT_RECIPE, train=loader, workdir=workdir, resume=True)


def start(workdir: Path, after: int, number: int) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "COMPRESS_PROGRESS": "plain"}
    command = [sys.executable, "-c", PROGRAM, str(workdir), str(after), str(int(number))]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, cwd=TESTS, start_new_session=True
    )


def test_signals_of_a_terminal_leave_the_workers_alive_and_the_message_says_how_to_go_on(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", 0, 0)
    assert whole.returncode == 0, whole.stderr
    interrupted, terminated = (signal.SIGINT, -signal.SIGINT, 3, "search"), (signal.SIGTERM, 143, 9, "finetune")
    for number, code, after, stage in (interrupted, terminated):
        ended = start(tmp_path / "out", after, number)
        said = " ".join(ended.stderr.split())
        assert ended.returncode == code, ended.stderr
        assert "interrupted: a checkpoint is written after this step; Ctrl-C again stops at once" in said
        assert f"interrupted in stage {stage}; continue with resume=True (--resume) and the same workdir" in said
        assert position(tmp_path / "out")[0] == stage
    assert start(tmp_path / "out", 0, 0).returncode == 0
    for name in ("model.safetensors", "plan.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_signal_to_one_of_two_processes_saves_and_ends_both(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "helpers.terminated_runs", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for entry, where in zip(json.loads(done.stdout.splitlines()[-1]), (["search", 2], ["finetune", 5]), strict=True):
        assert entry == {"codes": [143, 143], "where": where, "same": True}


def test_second_interrupt_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "SAME_INTERRUPT", -1.0)
    seen = []

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("the first waits")
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("the second does not")

    with pytest.raises(KeyboardInterrupt):
        prune(4, twice, tmp_path)
    assert seen == ["the first waits"]
    assert CheckpointStore(tmp_path).is_empty


def test_interrupt_that_comes_twice_in_a_moment_counts_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prune(4, lambda: [send(number)() for number in (*HANDLED, *HANDLED)] and None, tmp_path)
    assert position(tmp_path) == ("search", 4)


def test_without_a_workdir_nothing_waits() -> None:
    seen = []

    def act() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("waited")

    with pytest.raises(KeyboardInterrupt):
        prune(4, act, None)
    assert not seen


def test_handler_of_the_user_is_called_behind_the_checkpoint(tmp_path: Path) -> None:
    seen = []
    signal.signal(signal.SIGTERM, lambda *_: seen.append(position(tmp_path)))
    try:
        prune(4, send(signal.SIGTERM), tmp_path)  # it returns: the run goes on
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert seen == [("search", 4)]
    assert (tmp_path / "plan.json").exists()


def test_ignored_signals_stay_ignored(tmp_path: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        prune(4, send(signal.SIGINT), tmp_path)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert (tmp_path / "plan.json").exists()


def test_error_of_the_block_does_not_swallow_the_signal() -> None:
    with pytest.raises(Terminated) as ended, Interruption(lambda: None).deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("a worker has gone")
    assert isinstance(ended.value.__context__, RuntimeError)
