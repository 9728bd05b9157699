"""Full disks, folders without write access, failing loaders, NaN, Ctrl-C, two runs at once: no result is lost."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from compress.cli import app as cli
from compress.storage.checkpoint import CheckpointStore
from compress.storage.lock import LOCK_FILE
from helpers.digits import dense, loaders
from helpers.interruption import SHORT_RECIPE, Interrupted, InterruptedLoader, small_loaders
from helpers.weights import same_weights

pytestmark = [
    pytest.mark.usefixtures("checkpoint_at_every_step"),
    pytest.mark.skipif(sys.platform == "win32", reason="limits and mounts of POSIX systems"),
]


class Acting:
    """A loader that does something when its n-th batch is asked for, counted over all epochs and stages."""

    def __init__(self, after: int, act: Callable[[Any], Any]) -> None:
        self.loader, self.left, self.act = small_loaders()[0], after, act
        self.batch_sampler = self.loader.batch_sampler  # which is seeded wherever it is seen

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.left -= 1
            yield self.act(batch) if self.left == -1 else batch


def pruned(workdir: Path, train: Any = None, resume: bool = False, **more: Any) -> compress.Pruned:
    given = {"train": train or small_loaders()[0], "val": small_loaders()[1], "workdir": workdir, "quiet": True}
    return compress.prune(dense(), {**SHORT_RECIPE, **more}, resume=resume, **given)


def scraps(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


def noted(error: BaseException, text: str) -> bool:
    """Whether an error carries a note; before Python 3.11 there were none, and it is printed instead."""
    return sys.version_info < (3, 11) or any(text in note for note in error.__notes__)


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, of a given size."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no file systems can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_file_that_may_not_grow_leaves_the_checkpoint_before(
    tmp_path: Path,
    undisturbed: compress.Pruned,
) -> None:
    """The kernel itself stops the write in its middle."""
    before, limits = b"", resource.getrlimit(resource.RLIMIT_FSIZE)

    def tighten(batch: Any) -> Any:
        nonlocal before
        before = CheckpointStore(tmp_path).path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
        return batch

    try:
        with pytest.raises(OSError, match="cannot be written") as caught:
            pruned(tmp_path, Acting(9, tighten))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = str(caught.value)
    assert "checkpoint.safetensors: cannot be written: File too large. It needs " in said
    assert "left: free some space; the existing file is unchanged" in said
    assert noted(caught.value, "stopped in stage finetune, after step 3 of 8; continue with resume=True")
    assert CheckpointStore(tmp_path).path.read_bytes() == before
    assert not scraps(tmp_path)
    assert same_weights(pruned(tmp_path, resume=True).model, undisturbed.model)


def test_full_disk_leaves_the_checkpoint_before(tmp_path: Path, undisturbed: compress.Pruned) -> None:
    with mounted(tmp_path / "small", "8m") as disk:

        def fill(batch: Any) -> Any:
            with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(bytes(1 << 16)) or file.write(b"0")
            return batch

        with pytest.raises(OSError, match=r"No space left on device\. It needs .*small/run has 0 bytes left"):
            pruned(disk / "run", Acting(4, fill))
        assert not scraps(disk / "run")
        with pytest.raises(OSError, match="No space left on device"):
            undisturbed.save(disk / "saved")
        assert {p.name for p in disk.iterdir()} == {"filler", "run"}
        (disk / "filler").unlink()
        assert same_weights(pruned(disk / "run", resume=True).model, undisturbed.model)


def test_full_disk_behind_the_last_stage_says_how_to_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: compress.Pruned,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("compress.api.write_atomic", full)
        with pytest.raises(OSError, match="No space left on device") as caught:
            pruned(tmp_path)
    assert noted(caught.value, f"continue with resume=True (--resume) and the same workdir, {tmp_path}")
    assert same_weights(pruned(tmp_path, resume=True).model, undisturbed.model)


def test_full_disk_before_the_first_checkpoint_says_to_start_again(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "40k") as disk:
        with pytest.raises(OSError, match=r"checkpoint.* cannot be written: No space left on device") as caught:
            compress.prune(
                dense(),
                {"budget": {"macs": "50%"}},
                example_inputs=next(iter(small_loaders()[0]))[0],
                workdir=disk / "run",
                quiet=True,
            )
        assert noted(caught.value, "nothing to resume yet: start again")


def test_place_that_cannot_be_written_to_is_refused_before_anything_is_spent(
    tmp_path: Path,
    undisturbed: compress.Pruned,
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"file/run/\.lock: cannot be written: .*/file is a file\. Choose a directory"):
        pruned(tmp_path / "file" / "run")
    with pytest.raises(OSError, match=r"file/saved: cannot be written: .*/file is a file\. Choose a directory"):
        undisturbed.save(tmp_path / "file" / "saved")
    with mounted(tmp_path / "disk", "8m") as disk:
        with pytest.raises(Interrupted):
            pruned(disk / "run", InterruptedLoader(small_loaders()[0], 9))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(
            OSError, match=r"\.lock: cannot be written: Read-only file system\. .*Choose a directory that you can"
        ):
            pruned(disk / "run", resume=True)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert same_weights(pruned(disk / "run", resume=True).model, undisturbed.model)


@pytest.mark.parametrize(("after", "stage"), [(4, "search, after step 3 of 6"), (9, "finetune, after step 2 of 8")])
def test_loader_that_fails_in_the_middle_costs_nothing(
    after: int,
    stage: str,
    tmp_path: Path,
    undisturbed: compress.Pruned,
) -> None:
    def fail(batch: Any) -> Any:
        raise ConnectionError("the server of images is gone")

    with pytest.raises(ConnectionError, match="the server of images is gone") as caught:
        pruned(tmp_path, Acting(after, fail))
    how = f"continue with resume=True (--resume) and the same workdir, {tmp_path}"
    assert noted(caught.value, f"stopped in stage {stage}; {how}")
    assert same_weights(pruned(tmp_path, resume=True).model, undisturbed.model)


def test_nan_in_the_data_leaves_the_checkpoint_before(tmp_path: Path, undisturbed: compress.Pruned) -> None:
    with pytest.raises(
        compress.errors.Diverged, match=r"(?s)finetune, step 3 of 8: .*repair them, and continue with resume=True"
    ):
        pruned(tmp_path, Acting(9, lambda batch: [batch[0] * float("nan"), batch[1]]))
    assert same_weights(pruned(tmp_path, resume=True).model, undisturbed.model)


def test_weights_that_are_no_numbers_do_not_replace_a_checkpoint(tmp_path: Path) -> None:
    """The loss of a step is finite, and the weights behind it are not."""
    with pytest.raises(compress.errors.Diverged, match="the loss is not finite"):
        pruned(tmp_path, finetune={"epochs": "8 steps", "lr": 1e38, "schedule": "constant", "momentum": 0})
    found = CheckpointStore(tmp_path).load()
    assert found is not None
    assert all(bool(t.isfinite().all()) for t in found[0].values())


def interrupted() -> tuple[Any, Any]:
    """Loaders of which the first is interrupted by a signal."""
    train, val = loaders(batch=64, count=256)

    class Interrupted(Acting):
        def __init__(self) -> None:
            super().__init__(9, lambda batch: signal.raise_signal(signal.SIGINT) or batch)

    return (Interrupted() if os.environ.get("INTERRUPT") else train), val


def test_interrupted_command_says_how_to_go_on_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "budget: {macs: 50%}\nsearch: {method: netslim, epochs: 6 steps}\n"
        "finetune: {epochs: 8 steps}\ntiming: {repeats: 3}\n"
    )
    words = [
        "--model",
        "compress.cli.quickstart:Network",
        "--data",
        "test_trouble:interrupted",
        "--recipe",
        str(recipe),
    ]

    def run(*more: str) -> tuple[int, str]:
        torch.manual_seed(0)  # of the model, which has no weights from a file
        monkeypatch.setattr(sys, "argv", ["compress", "prune", *words, *more])
        with pytest.raises(SystemExit) as done:
            cli.main()
        return int(done.value.code or 0), " ".join(capsys.readouterr().err.split())

    monkeypatch.setenv("INTERRUPT", "1")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        code, said = run("--workdir", str(tmp_path / "out"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130
    assert "interrupted in stage finetune; continue with resume=True (--resume) and the same workdir" in said
    assert "Traceback" not in said
    monkeypatch.delenv("INTERRUPT")
    assert run("--workdir", str(tmp_path / "out"), "--resume", "--quiet")[0] == 0
    assert run("--workdir", str(tmp_path / "whole"), "--quiet")[0] == 0
    states = [compress.load(compress.cli.quickstart.Network(), tmp_path / name) for name in ("out", "whole")]
    assert same_weights(*states)


def test_second_run_in_a_workdir_is_refused_while_the_first_lasts(tmp_path: Path) -> None:
    def second(batch: Any) -> Any:
        with pytest.raises(
            FileExistsError, match=rf"in use by another run \(process {os.getpid()} on .*, which is this one\)"
        ):
            pruned(tmp_path, resume=True)
        return batch

    pruned(tmp_path, Acting(4, second))
    assert not (tmp_path / LOCK_FILE).exists()
