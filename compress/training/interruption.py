"""Interruption: Ctrl-C and SIGTERM end a training loop behind a step, when its checkpoint is written."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

TERMINATED = 143  # exit code of programs that SIGTERM ends: 128 + 15
SAME_INTERRUPT = 1.0  # seconds: `torchrun` passes on a Ctrl-C that its processes got from the terminal as well


class Terminated(SystemExit):
    """The process was asked to end by SIGTERM, as schedulers of clusters do before they kill it."""


class Interruption:
    """A signal that waits until the training loop has written its checkpoint.

    Args:
        announce: called in the signal handler when the first signal comes.

    Attributes:
        signal: number of the signal that waits; 0 if there is none.
    """

    def __init__(self, announce: Callable[[], None]) -> None:
        self.signal = 0
        self._announce = announce
        self._since, self._process = 0.0, os.getpid()
        self._handlers: dict[int, Any] = {}  # that were replaced, by signal

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM wait during the block; a second Ctrl-C ends the block at once.

        Ignored signals stay ignored. Only the main thread can handle signals: in another one nothing waits.
        """
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (None, signal.SIG_IGN):  # None: not set by Python
                    self._handlers[number] = signal.signal(number, self._receive)
        try:
            yield
        finally:
            self._restore_handlers()
            if self.signal:
                self.deliver(self.signal)

    def deliver(self, number: int) -> None:
        """Restore the handlers and do what the signal would have done before; a handler of the user may return.

        Raises:
            KeyboardInterrupt: the signal is SIGINT.
            Terminated: the signal is SIGTERM.
        """
        self._restore_handlers()
        self.signal = 0
        handler = signal.getsignal(number)
        is_of_user = callable(handler) and handler is not signal.default_int_handler
        if is_of_user and threading.current_thread() is threading.main_thread():
            signal.raise_signal(number)
        elif number == signal.SIGTERM:
            raise Terminated(TERMINATED)
        else:
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # a worker of a loader, which lives until the step is done
            if number == signal.SIGTERM:
                signal.signal(number, self._handlers[number])
                signal.raise_signal(number)
        elif not self.signal:
            self.signal, self._since = number, time.monotonic()
            self._announce()
        elif number == signal.SIGINT and time.monotonic() - self._since > SAME_INTERRUPT:
            self.deliver(number)

    def _restore_handlers(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())
