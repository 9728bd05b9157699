"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room, for anybody, this user or this process
EXPORTED = ("model.onnx", "model.int8.onnx")
TRACK = "track"
KEPT = (TRACK, "config.py", "finetune")  # stays beside what is saved: of trackers, of MMDetection, of a task's own loop
SAVED = {
    "plan.json",
    "model.safetensors",
    "report.json",
    "report.html",
    "run.json",
    "checkpoint.safetensors",
    "checkpoint.before.safetensors",
    ".lock",
    *EXPORTED,
    *KEPT,
}


def write_whole(path: Path, data: bytes, before: Path | None = None) -> None:
    """Write beside the target, then rename over it; what was there goes to `before`.

    Raises:
        OSError: it cannot be written; what was there is as it was, and nothing is left beside it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            if before is not None and path.exists():
                os.replace(path, before)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise unwritten(path, len(data), error) from error


def unwritten(path: Path, size: int, error: OSError) -> OSError:
    """The same error, with what was to be written where, how much room it takes, and what to do about it."""
    there = next((p for p in path.absolute().parents if p.is_dir()), Path("/"))
    blocked = next((p for p in path.absolute().parents if p.is_file()), None)
    why = f"{blocked} is a file" if blocked is not None else error.strerror or str(error)
    text = f"{path}: cannot be written: {why}. "
    if error.errno in FULL:
        text += f"It takes {_bytes(size)}, and {there} has {_bytes(shutil.disk_usage(there).free)} left: make room"
    else:
        text += "Choose a place that can be written to"
    held = "; the file that was there is as it was" if path.is_file() else ""
    found = OSError(f"{text}{held}")
    found.errno = error.errno
    return found


def _bytes(count: float) -> str:
    """
    >>> _bytes(12), _bytes(2_345_678)
    ('12 bytes', '2.3 MB')
    """
    if count < 1000:
        return f"{count:.0f} bytes"
    unit = next((u for u in ("kB", "MB", "GB") if (count := count / 1000) < 1000), "TB")
    return f"{count / 1000 if unit == 'TB' else count:.1f} {unit}"


def check_directory(path: Path) -> None:
    """
    Raises:
        FileExistsError: `path` holds files that are not ours to replace.
    """
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path}: expected a directory, found a file")
    others = sorted(p.name for p in path.iterdir() if p.name not in SAVED) if path.exists() else []
    if others:
        raise FileExistsError(
            f"{path}: expected an empty or missing directory, or one saved before; it holds other files ({others[0]})"
        )


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """A fresh directory that takes the place of `path` when the block ends well.

    Raises:
        FileExistsError: `path` holds files that are not ours to replace.
        OSError: it cannot be written.
    """
    check_directory(path)
    path = path.resolve()  # a link goes on pointing there
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        raise unwritten(path, 0, error) from error
    try:
        yield fresh
        os.chmod(fresh, 0o755)
        if path.exists():
            old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
            os.replace(path, old)
            try:
                os.replace(fresh, path)
            except BaseException:
                os.replace(old, path)
                raise
            shutil.rmtree(old)
        else:
            os.replace(fresh, path)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
