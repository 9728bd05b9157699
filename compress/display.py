"""What a person sees while something runs: bars with the time left in a terminal, a line now and then elsewhere.

COMPRESS_PROGRESS (or --progress) says otherwise: plain lines, JSON lines for other programs to read, or off.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY = 30.0  # seconds between two lines where there is no terminal
EVERY_JSON = 1.0  # and between two for other programs
FORMS = ("auto", "plain", "json", "off")
VARIABLE = "COMPRESS_PROGRESS"


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
        elif self._display.form == "json" and (done == self._total or time.monotonic() - self._said > EVERY_JSON):
            self._said = time.monotonic()
            numbers = {"values": dict(values)} if isinstance(values, Mapping) and values else {}
            self._display.tell({"doing": self._name, "done": done, "of": self._total, "left_s": self._rest()} | numbers)
        elif self._display.form != "json" and time.monotonic() - self._said > EVERY:
            self._said = time.monotonic()
            self._display.say(f"{self._name}: {done} of {self._total or '?'}, {self._left()}  {info}")

    def close(self) -> None:
        if self._display.progress and self._task is not None:
            self._display.progress.remove_task(self._task)

    def _left(self) -> str:
        rest = self._rest()
        return f"{_clock(time.monotonic() - self._start)} so far" if rest is None else f"{_clock(rest)} left"

    def _rest(self) -> float | None:
        """Seconds, if the end is known."""
        spent = time.monotonic() - self._start
        return spent * (self._total - self._done) / self._done if self._total and self._done else None


class Display:
    """Bars on stderr in a terminal; plain lines there if not; nothing where `quiet`.

    Raises:
        ValueError: the environment asks for a form that is none of FORMS.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.form = "off" if quiet else os.environ.get(VARIABLE) or "auto"
        if self.form not in FORMS:
            raise ValueError(f"{VARIABLE}: expected one of {', '.join(FORMS)}; got {self.form!r}")
        self.console = Console(stderr=True, quiet=self.form == "off", highlight=False)
        self.progress: Progress | None = None

    def __enter__(self) -> Display:
        if self.console.is_terminal and self.form == "auto":
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
        if self.form == "json":
            self.tell({"say": text})
        else:
            self.console.print(text, markup=False)

    def tell(self, facts: Mapping[str, object]) -> None:
        """A line for other programs."""
        self.console.print(json.dumps({"time": round(time.time(), 3), **facts}), markup=False, soft_wrap=True)

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
