"""Lock of a working directory: one run at a time. The system releases it when the process ends, also if killed."""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .files import describe_write_error

LOCK_FILE = ".lock"
_HELD_LOCKS: set[Path] = set()  # by this process: file locks do not exclude the process that holds them


@contextmanager
def lock_directory(folder: Path) -> Iterator[None]:
    """Keep other runs out of a directory; create it if it does not exist.

    Raises:
        FileExistsError: another run uses it, it is a file, or a link that leads nowhere.
        OSError: it cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder}: expected a directory, found a file")
    if dangling := next((p for p in (folder, *folder.parents) if p.is_symlink() and not p.exists()), None):
        raise FileExistsError(
            f"{dangling}: is a link to {dangling.readlink()}, which does not exist; create that directory, remove the "
            "link, or choose another directory"
        )
    path, created = folder.resolve() / LOCK_FILE, not folder.exists()
    if path in _HELD_LOCKS:
        raise _in_use_error(folder, f"{_this_process()}, which is this one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _open_locked(folder, path)
    except FileExistsError:
        raise
    except OSError as error:
        raise describe_write_error(path, 100, error) from error
    _HELD_LOCKS.add(path)
    try:
        yield
    finally:
        _HELD_LOCKS.discard(path)
        if sys.platform == "win32":  # an open file cannot be removed there
            os.close(descriptor)
        with suppress(OSError):
            path.unlink()
        if sys.platform != "win32":
            os.close(descriptor)
        if created:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _open_locked(folder: Path, path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _try_lock(descriptor, folder):
                raise _in_use_error(folder, os.read(descriptor, 200).decode("utf-8", "replace") or "just started")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, _this_process().encode())
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the previous run ended and removed the file after it was opened here: try again


def _try_lock(descriptor: int, folder: Path) -> bool:
    """Return whether the lock was acquired; warn if the file system has none."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, 4096, os.SEEK_SET)  # after the text, which others read
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            import fcntl

            # Not flock: workers of a loader would inherit it, and they outlive a killed run.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        warnings.warn(
            f"{folder}: cannot be locked ({error.strerror}); make sure that no other run uses it", stacklevel=2
        )
    return True


def _this_process() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def _in_use_error(folder: Path, who: str) -> FileExistsError:
    return FileExistsError(f"{folder}: in use by another run ({who}); wait for it, stop it, or choose another workdir")
