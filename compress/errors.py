"""The public exceptions, and how an error is printed for a user."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from traceback import walk_tb

import torch


class RecipeError(ValueError):
    """The recipe is invalid. The message lists every problem with its place."""


class NotReady(ValueError):
    """The run cannot start. The message lists everything that is missing or does not fit."""


class BatchError(ValueError):
    """A data loader yields something other than the task expects."""


class TraceError(ValueError):
    """The model does not run on the example inputs."""


class PlanError(ValueError):
    """The plan does not fit the model, or the file is not a plan."""


class BudgetError(ValueError):
    """No choice of widths meets the budget."""


class Diverged(RuntimeError):
    """The loss is not finite."""


# Built-in types whose messages are complete when this library raises them.
SELF_EXPLANATORY = (ValueError, TypeError, OSError, ImportError)
PATHS = sysconfig.get_paths()
STANDARD_LIBRARY_AND_TORCH = (PATHS["stdlib"], PATHS["platstdlib"], str(Path(torch.__file__).parent), "<")
SITE_PACKAGES = (PATHS["purelib"], PATHS["platlib"])


def format_error(error: BaseException) -> str:
    """Return the message of an error for a user who does not see the traceback.

    Errors raised by this library are complete as they are. An error from code that the library called, such as a
    user's model, gets its type in front and the nearest line of the user's code behind it.

    >>> try:
    ...     {}[17]
    ... except KeyError as error:
    ...     format_error(error).partition(" (")[0]
    'KeyError: 17'
    """
    frames = [(f.f_globals.get("__name__", ""), f.f_code.co_filename, n) for f, n in walk_tb(error.__traceback__)]
    own_frames = [i for i, (module, _, _) in enumerate(frames) if module.partition(".")[0] == "compress"]
    called = [(file, line) for _, file, line in frames[own_frames[-1] + 1 if own_frames else 0 :]]
    if not called and (isinstance(error, SELF_EXPLANATORY) or type(error).__module__.startswith("compress.")):
        return str(error)
    lines = [(file, line) for file, line in called if not file.startswith(STANDARD_LIBRARY_AND_TORCH)]
    lines = [(file, line) for file, line in lines if not file.startswith(SITE_PACKAGES)] or lines
    message = type(error).__name__ + (f": {error}" if str(error) else "")
    return message + (f" ({_relative_path(lines[-1][0])}:{lines[-1][1]})" if lines else "")


def _relative_path(file: str) -> str:
    """Return a path relative to the current directory if the file is below it."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative
