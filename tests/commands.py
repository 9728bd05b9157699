"""A command, as the shell would run it."""

from __future__ import annotations

import sys

import pytest

from compress import cli


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """What it returns, what it prints, and what it says on stderr in one line."""
    monkeypatch.setattr(sys, "argv", ["compress", *words])
    with pytest.raises(SystemExit) as done:
        cli.main()
    streams = capsys.readouterr()
    return int(done.value.code or 0), streams.out, " ".join(streams.err.split())
