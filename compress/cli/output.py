"""Output streams of the command line, which do not fail for a reason that lies in the terminal.

Characters that the terminal's encoding lacks are replaced by similar ones. If the reader of a pipe has gone, the
program ends quietly: `compress recipes | head -1`.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

BROKEN_PIPE = 141  # exit code of programs whose reader has gone: 128 + SIGPIPE
ERROR_HANDLER = "compress.similar"
SIMILAR_CHARACTERS = {"±": "+-", "█": "#", "░": ".", "…": "...", "→": "->", "•": "*", "─": "-", "━": "-", "│": "|"}


def replace_unencodable(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return similar characters, or escapes, in place of those that an encoding lacks; an error handler of codecs."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    escapes = (character.encode("ascii", "backslashreplace").decode() for character in characters)
    return "".join(SIMILAR_CHARACTERS.get(*pair) for pair in zip(characters, escapes, strict=True)), error.end


codecs.register_error(ERROR_HANDLER, replace_unencodable)


class PipeStream:
    """A text stream that ends the program if the reader of its pipe has gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text."""
        with self._exit_if_broken():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush what was written."""
        with self._exit_if_broken():
            self._stream.flush()

    @contextmanager
    def _exit_if_broken(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            with suppress(OSError):  # what is still in the buffer goes nowhere, now and when the program ends
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, self._stream.fileno())
                os.close(devnull)
            raise SystemExit(BROKEN_PIPE) from None


@contextmanager
def robust_output() -> Iterator[None]:
    """Make stdout and stderr robust during the block."""
    with _robust_stream("stdout"), _robust_stream("stderr"):
        yield


@contextmanager
def _robust_stream(name: str) -> Iterator[None]:
    original: TextIO | None = getattr(sys, name)
    if original is None:  # closed before the program started
        yield
        return
    handler, robust = original.errors, PipeStream(original)
    _set_error_handler(original, ERROR_HANDLER)
    setattr(sys, name, robust)
    try:
        yield
    finally:
        setattr(sys, name, original)
        try:
            robust.flush()
        finally:
            _set_error_handler(original, handler)


def _set_error_handler(stream: TextIO, handler: str | None) -> None:
    if isinstance(stream, io.TextIOWrapper) and handler is not None:
        stream.reconfigure(errors=handler)
