"""What a person sees while something runs: bars with the time left in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY = 30.0  # seconds between two lines where there is no terminal


class Bar:
    """One thing under way."""

    def __init__(self, display: Display, name: str, total: int | None) -> None:
        self._display, self._name, self._total = display, name, total
        self._done, self._start, self._said = 0, time.monotonic(), time.monotonic()
        self._task = display.progress.add_task(name, total=total, info="") if display.progress else None

    def advance(self, values: Mapping[str, float] | str = "", by: int = 1) -> None:
        """One step further, with what was measured at it."""
        self.to(self._done + by, values)

    def to(self, done: int, values: Mapping[str, float] | str = "", total: int | None = None) -> None:
        self._done, self._total = done, total or self._total
        info = values if isinstance(values, str) else "  ".join(f"{k} {v:.4g}" for k, v in values.items())
        if self._display.progress and self._task is not None:
            self._display.progress.update(self._task, completed=done, total=self._total, info=info)
        elif time.monotonic() - self._said > EVERY:
            self._said = time.monotonic()
            self._display.say(f"{self._name}: {done} of {self._total or '?'}, {self._left()}  {info}")

    def close(self) -> None:
        if self._display.progress and self._task is not None:
            self._display.progress.remove_task(self._task)

    def _left(self) -> str:
        spent = time.monotonic() - self._start
        if not self._total or not self._done:
            return f"{_clock(spent)} so far"
        return f"{_clock(spent * (self._total - self._done) / self._done)} left"


class Display:
    """Bars on stderr in a terminal; plain lines there if not; nothing where `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.progress: Progress | None = None

    def __enter__(self) -> Display:
        if self.console.is_terminal and not self.console.quiet:
            columns = (
                BarColumn(24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self.progress = Progress(
                TextColumn("{task.description:<22}"), *columns, TextColumn("{task.fields[info]}"), console=self.console
            )
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress:
            self.progress.stop()
            self.progress = None

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def bar(self, name: str, total: int | None = None) -> Iterator[Bar]:
        bar = Bar(self, name, total)
        try:
            yield bar
        finally:
            bar.close()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
