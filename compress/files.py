"""Files are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXPORTED = ("model.onnx", "model.int8.onnx")
SAVED = {
    "plan.json",
    "model.safetensors",
    "report.json",
    "report.html",
    "run.json",
    "checkpoint.safetensors",
    "checkpoint.before.safetensors",
    *EXPORTED,
}


def write_whole(path: Path, data: bytes, before: Path | None = None) -> None:
    """Write beside the target, then rename over it; what was there goes to `before`."""
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
    """
    check_directory(path)
    path = path.resolve()  # a link goes on pointing there
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
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
