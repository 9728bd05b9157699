"""The first seconds of the command line: Ctrl-C ends it in one line while the library is still being imported.

Importing this module is enough; `compress/__init__.py` does it before anything that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

INTERRUPTED = 130  # exit code


def is_command_line() -> bool:
    """Return whether this process was started as `compress` or as `python -m compress`."""
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    if program == "-m":  # until Python has found the module
        return sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] == ["compress"]
    return program in ("compress", "compress.exe")


def exit_when_interrupted(*_: Any) -> None:
    """End the process at once: there is nothing to save, and imports that are cut off raise errors of all kinds."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def restore_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, because the command can handle it from here on."""
    if signal.getsignal(signal.SIGINT) is exit_when_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if (
    is_command_line()
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not if interrupts are ignored, as with nohup
):
    signal.signal(signal.SIGINT, exit_when_interrupted)
