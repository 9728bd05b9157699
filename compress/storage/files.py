"""Atomic writes: a file appears completely or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # for everybody, this user, this process
EXPORT_FILES = ("model.onnx", "model.int8.onnx")
TRACKER_FOLDER = "track"
YOLO_FILE = "yolo.json"  # the architecture of a network of Ultralytics
# Kept when a result is saved over them: logs of trackers, MMDetection's config, the architecture of a YOLO,
# checkpoints of a task's own loop, and what Hugging Face's image processors save.
PRESERVED = (TRACKER_FOLDER, "config.py", YOLO_FILE, "finetune", "preprocessor_config.json", "processor_config.json")
OWN_FILES = {
    "plan.json",
    "model.safetensors",
    "report.json",
    "report.html",
    "run.json",
    "landscape.json",
    "landscape.part.json",
    "config.json",
    "checkpoint.safetensors",
    "checkpoint.before.safetensors",
    ".lock",
    *EXPORT_FILES,
    *PRESERVED,
}

# Files of trade-offs and sensitivities, which lie in directories that no result replaces.
_OTHER_FILES = {f"{name}.{kind}" for name in ("tradeoff", "sensitivity") for kind in ("json", "html")}
# Names that `mkstemp` gives.
_TEMPORARY_NAME = re.compile(rf"\.(?:{'|'.join(map(re.escape, sorted(OWN_FILES | _OTHER_FILES)))})\.[a-z0-9_]{{8}}")


def is_temporary_file(path: Path) -> bool:
    """Return whether a file is an unfinished write of ours, left behind by a process that was killed."""
    return _TEMPORARY_NAME.fullmatch(path.name) is not None


def remove_temporary_files(folder: Path) -> None:
    """Remove unfinished writes from a directory. Hold its lock if it has one: they may belong to a running process."""
    for path in filter(is_temporary_file, folder.iterdir()):
        path.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes, previous: Path | None = None) -> None:
    """Write a temporary file next to `path`, then rename it; the old file goes to `previous`, if given.

    Raises:
        OSError: it cannot be written; the old file is unchanged and no temporary file is left.
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
            if previous is not None and path.exists():
                os.replace(path, previous)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise describe_write_error(path, len(data), error) from error


def check_writable(path: Path) -> None:
    """Check, before the work whose result it will hold, that `write_atomic` can write a file; create its directory.

    Raises:
        OSError: it cannot be written.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise describe_write_error(path, 0, error) from error


def describe_write_error(path: Path, size: int, error: OSError) -> OSError:
    """Return the error with the path, the space that is needed and free, and what to do."""
    directory = next((p for p in path.absolute().parents if p.is_dir()), Path("/"))
    blocked = next((p for p in path.absolute().parents if p.is_file()), None)
    why = f"{blocked} is a file" if blocked is not None else error.strerror or str(error)
    text = f"{path}: cannot be written: {why}. "
    if error.errno in DISK_FULL_ERRORS:
        free = _format_bytes(shutil.disk_usage(directory).free)
        text += f"It needs {_format_bytes(size)}, and {directory} has {free} left: free some space"
    else:
        text += "Choose a directory that you can write to"
    unchanged = "; the existing file is unchanged" if path.is_file() else ""
    described = OSError(f"{text}{unchanged}")
    described.errno = error.errno
    return described


def _format_bytes(count: float) -> str:
    """Return a size with its unit.

    >>> _format_bytes(12), _format_bytes(2_345_678)
    ('12 bytes', '2.3 MB')
    """
    if count < 1000:
        return f"{count:.0f} bytes"
    unit = next((u for u in ("kB", "MB", "GB") if (count := count / 1000) < 1000), "TB")
    return f"{count / 1000 if unit == 'TB' else count:.1f} {unit}"
