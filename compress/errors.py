"""What an error says: the library's own messages as they are, others with their type and their place."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from traceback import walk_tb

import torch

OURS = (ValueError, TypeError, OSError, ImportError)  # and those of a type of our own
PATHS = sysconfig.get_paths()
LIBRARIES = (PATHS["stdlib"], PATHS["platstdlib"], str(Path(torch.__file__).parent), "<")
INSTALLED = (PATHS["purelib"], PATHS["platlib"])


def said(error: BaseException) -> str:
    """The message; of an error in code that the library called also its type, and the line of a user's file.

    >>> try:
    ...     {}[17]
    ... except KeyError as error:
    ...     said(error).partition(" (")[0]
    'KeyError: 17'
    """
    frames = [(f.f_globals.get("__name__", ""), f.f_code.co_filename, n) for f, n in walk_tb(error.__traceback__)]
    inside = [i for i, (module, _, _) in enumerate(frames) if module.partition(".")[0] == "compress"]
    called = [(file, line) for _, file, line in frames[inside[-1] + 1 if inside else 0 :]]
    if not called and (isinstance(error, OURS) or type(error).__module__.startswith("compress.")):
        return str(error)
    places = [(file, line) for file, line in called if not file.startswith(LIBRARIES)]
    places = [(file, line) for file, line in places if not file.startswith(INSTALLED)] or places
    name = type(error).__name__ + (f": {error}" if str(error) else "")
    return name + (f" ({_short(places[-1][0])}:{places[-1][1]})" if places else "")


def _short(file: str) -> str:
    here = os.path.relpath(file)
    return file if here.startswith("..") else here
