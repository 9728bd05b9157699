"""Replace a directory as a whole: a reader finds the old one or the new one at any moment, also if the save is killed.

The new directory is written beside the old one, as `.NAME.saving-XXXXXXXX`, and the two are exchanged in one step.
Where the system cannot do that, the old one is `.NAME.replaced-XXXXXXXX` between two renames; readers find it there.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .files import OWN_FILES, describe_write_error, is_temporary_file

SAVING, REPLACED = "saving-", "replaced-"
SECONDS_OF_A_DAY = 86_400
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of renameat2 in Linux


def check_replaceable(path: Path) -> None:
    """Check that a directory may be replaced by a saved result.

    Raises:
        FileExistsError: `path` holds files of something else.
    """
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path}: expected a directory, found a file")
    others = (
        sorted(p.name for p in path.iterdir() if p.name not in OWN_FILES and not is_temporary_file(p))
        if path.exists()
        else []
    )
    if others:
        raise FileExistsError(
            f"{path}: expected an empty or missing directory, or a saved result; it holds other files ({others[0]})"
        )


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory that replaces `path` if the block succeeds; remove what killed saves left behind.

    Raises:
        FileExistsError: `path` holds files of something else.
        OSError: it cannot be written.
    """
    target = path.resolve()  # replace the target of a link, not the link
    _recover(target)
    check_replaceable(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        new, lock = _make_locked_directory(target)
    except OSError as error:
        raise describe_write_error(target, 0, error) from error
    try:
        yield new
        os.chmod(new, 0o755)
        _publish(new, target)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # holds what was replaced, or what is unfinished
        if lock is not None:
            os.close(lock)


def find_saved(path: Path) -> Path:
    """Return `path`, or the directory that was there if a save is, or was killed, between its two renames."""
    if path.exists():
        return path
    replaced = _siblings(path.resolve(), REPLACED)
    return replaced[-1] if replaced else path


def _publish(new: Path, path: Path) -> None:
    """Rename `new` to `path`, and what was there to `new`."""
    if not path.exists():
        os.replace(new, path)
    elif not _exchange(new, path):
        replaced = _twin(new, SAVING, REPLACED)
        os.replace(path, replaced)
        try:
            os.replace(new, path)
        except BaseException:
            os.replace(replaced, path)
            raise
        with suppress(FileNotFoundError):  # another save has cleaned it up
            os.replace(replaced, new)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step; return False if system or file system cannot."""
    if sys.platform != "linux":
        return False
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):  # a C library without it
        return False
    return not renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE)


def _recover(path: Path) -> None:
    """Put back the directory that a killed save had renamed, and remove what killed saves left behind."""
    for replaced in _siblings(path, REPLACED):
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        elif _is_abandoned(_twin(replaced, REPLACED, SAVING)):
            os.replace(replaced, path)
    for unfinished in filter(_is_abandoned, _siblings(path, SAVING)):
        shutil.rmtree(unfinished, ignore_errors=True)


def _siblings(path: Path, infix: str) -> list[Path]:
    """Return the directories of saves to `path`, the newest last."""
    prefix = f".{path.name}.{infix}"
    try:
        siblings = [folder for folder in path.parent.iterdir() if folder.name.startswith(prefix)]
        return sorted(siblings, key=lambda folder: folder.stat().st_mtime)
    except OSError:  # there is no parent, or a save has just removed one of them
        return []


def _twin(folder: Path, infix: str, other: str) -> Path:
    """Return the path that differs in the infix only."""
    start, _, end = folder.name.rpartition(infix)
    return folder.with_name(f"{start}{other}{end}")


def _make_locked_directory(path: Path) -> tuple[Path, int | None]:
    """Make a directory for a save to `path`, locked so that other saves do not take it for abandoned."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.{SAVING}"))
        lock = _lock(folder, wait=True)
        if folder.exists():
            return folder, lock
        if lock is not None:  # another save removed the folder before it was locked
            os.close(lock)


def _lock(folder: Path, wait: bool = False) -> int | None:
    """Return a descriptor that holds the lock of a directory, or None if another does or there are no locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _is_abandoned(folder: Path) -> bool:
    """Return whether the save that made a directory has ended; where there are no locks, those of a day ago have."""
    try:
        age = time.time() - folder.stat().st_mtime
    except FileNotFoundError:
        return True
    lock = _lock(folder)
    if lock is not None:
        os.close(lock)
    return lock is not None or age > SECONDS_OF_A_DAY
