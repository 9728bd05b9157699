"""Where a file is to go: found out before anything is spent."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def place(path: Path) -> Path:
    """The path itself, once it is known that a file can be written there.

    Raises:
        FileNotFoundError: the directory does not exist.
        OSError: a file cannot be written there.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path}: expected the name of a file such as model.onnx; it is a directory")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: expected an existing directory; there is no {path.parent}. Make it first")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise OSError(f"{path}: nothing can be written in {path.parent} ({why}); choose another directory") from error
    return path
