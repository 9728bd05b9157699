"""Progress on stderr: bars with the remaining time in a terminal, a line every 30 seconds elsewhere.

COMPRESS_PROGRESS (or --progress) chooses another mode: plain lines, JSON lines for other programs, or off.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from compress.formatting import printable

SECONDS_BETWEEN_LINES = 30.0
SECONDS_BETWEEN_JSON_LINES = 1.0
PROGRESS_MODES = ("auto", "plain", "json", "off")
PROGRESS_VARIABLE = "COMPRESS_PROGRESS"


class ProgressBar:
    """Progress of one activity, as a bar or as lines, depending on the display's mode."""

    def __init__(self, display: ProgressDisplay, name: str, total: int | None) -> None:
        self._display, self._name, self._total = display, name, total
        self._done, self._start, self._last_line_time = 0, time.monotonic(), time.monotonic()
        self._task = display.progress.add_task(name, total=total, info="") if display.progress else None

    def advance(self, values: Mapping[str, float] | str = "", by: int = 1) -> None:
        """Count further steps and show values, such as losses, or a text."""
        self.update(self._done + by, values)

    def update(self, done: int, values: Mapping[str, float] | str = "", total: int | None = None) -> None:
        """Set how many steps are done, show values or a text, and change the total if it is given."""
        self._done, self._total = done, total or self._total
        info = values if isinstance(values, str) else format_terms(values)
        info = printable(info)
        if self._display.progress and self._task is not None:
            self._display.progress.update(self._task, completed=done, total=self._total, info=info)
        elif self._display.mode == "json" and (
            done == self._total or time.monotonic() - self._last_line_time > SECONDS_BETWEEN_JSON_LINES
        ):
            self._last_line_time = time.monotonic()
            numbers = {"values": dict(values)} if isinstance(values, Mapping) and values else {}
            self._display.json_line(
                {"doing": self._name, "done": done, "of": self._total, "left_s": self._seconds_left()} | numbers
            )
        elif self._display.mode != "json" and time.monotonic() - self._last_line_time > SECONDS_BETWEEN_LINES:
            self._last_line_time = time.monotonic()
            self._display.message(f"{self._name}: {done} of {self._total or '?'}, {self._format_time_left()}  {info}")

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._display.progress and self._task is not None:
            self._display.progress.remove_task(self._task)

    def _format_time_left(self) -> str:
        seconds = self._seconds_left()
        if seconds is None:
            return f"{_format_clock(time.monotonic() - self._start)} so far"
        return f"{_format_clock(seconds)} left"

    def _seconds_left(self) -> float | None:
        """Return an estimate; None if the total is unknown or nothing is done."""
        spent = time.monotonic() - self._start
        return spent * (self._total - self._done) / self._done if self._total and self._done else None


class ProgressDisplay:
    """Show bars on stderr in a terminal, lines elsewhere, nothing if `quiet`.

    Raises:
        ValueError: COMPRESS_PROGRESS is not one of PROGRESS_MODES.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.mode = "off" if quiet else os.environ.get(PROGRESS_VARIABLE) or "auto"
        if self.mode not in PROGRESS_MODES:
            raise ValueError(f"{PROGRESS_VARIABLE}: expected one of {', '.join(PROGRESS_MODES)}; got {self.mode!r}")
        self.console = Console(stderr=True, quiet=self.mode == "off", highlight=False)
        self.progress: Progress | None = None

    def __enter__(self) -> ProgressDisplay:
        if self.console.is_terminal and self.mode == "auto":
            columns = (
                BarColumn(24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self.progress = Progress(
                TextColumn("{task.description:<22}"),
                *columns,
                TextColumn("{task.fields[info]}", markup=False),
                console=self.console,
            )
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress:
            self.progress.stop()
            self.progress = None

    def message(self, text: str) -> None:
        """Print a line of text."""
        if self.mode == "json":
            self.json_line({"say": text})
        else:
            self.console.print(printable(text), markup=False)

    def json_line(self, values: Mapping[str, object]) -> None:
        """Print a line of JSON, for other programs."""
        self.console.print(json.dumps({"time": round(time.time(), 3), **values}), markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, name: str, total: int | None = None) -> Iterator[ProgressBar]:
        """Show the progress of an activity during the block."""
        bar = ProgressBar(self, name, total)
        try:
            yield bar
        finally:
            bar.close()


def format_terms(terms: Mapping[str, float]) -> str:
    """Return the terms of a loss as text: the task's first, without their sum, which a penalty on scores dominates.

    >>> format_terms({"loss": 49.18, "task": 0.3291, "penalty": 48.85})
    'task 0.3291  penalty on scores 48.85'
    >>> format_terms({"loss": 0.25})
    'loss 0.25'
    """
    parts = [name for name in terms if name != "loss"] or list(terms)
    labels = {"penalty": "penalty on scores"}
    ordered = sorted(parts, key=lambda name: (name != "task", name == "penalty"))
    return "  ".join(f"{labels.get(name, name)} {terms[name]:.4g}" for name in ordered)


def _format_clock(seconds: float) -> str:
    minutes, full_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{full_seconds:02}"
