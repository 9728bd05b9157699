"""One run at a time in a working directory. The lock goes with the process, however that ends."""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .files import unwritten

LOCK = ".lock"
_HELD: set[Path] = set()  # by this process, which its own locks do not keep out


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a directory, which is made if need be.

    Raises:
        FileExistsError: another run is in it.
        OSError: it cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder}: expected a directory, found a file")
    path, fresh = folder.resolve() / LOCK, not folder.exists()
    if path in _HELD:
        raise _in_use(folder, f"{_me()}, this one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _taken(folder, path)
    except FileExistsError:
        raise
    except OSError as error:
        raise unwritten(path, 100, error) from error
    _HELD.add(path)
    try:
        yield
    finally:
        _HELD.discard(path)
        if sys.platform == "win32":  # where an open file cannot be removed
            os.close(descriptor)
        with suppress(OSError):
            path.unlink()
        if sys.platform != "win32":
            os.close(descriptor)
        if fresh:
            with suppress(OSError):  # there is something in it
                folder.rmdir()


def _taken(folder: Path, path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _lock(descriptor, folder):
                raise _in_use(folder, os.read(descriptor, 200).decode("utf-8", "replace") or "which has just begun")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, _me().encode())
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the run before ended, and took its file away, while this one opened it


def _lock(descriptor: int, folder: Path) -> bool:
    """Whether the lock was to be had."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, 4096, os.SEEK_SET)  # behind what others may want to read
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            import fcntl

            # Not flock: the workers of a loader would inherit that, and outlive a run that was killed.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        warnings.warn(f"{folder}: has no locks ({error.strerror}); see to it that no other run uses it", stacklevel=2)
    return True


def _me() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def _in_use(folder: Path, who: str) -> FileExistsError:
    return FileExistsError(f"{folder}: in use by another run ({who}); wait for it, stop it, or choose another workdir")
