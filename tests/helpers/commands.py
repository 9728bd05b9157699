"""Run a command as the shell would."""

from __future__ import annotations

import sys

import pytest

from compress.cli import app as cli

RESNET18 = ["--model", "torchvision:resnet18", "--input", "1,3,64,64"]


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """What it returns, what it prints, and what it says on stderr in one line."""
    monkeypatch.setattr(sys, "argv", ["compress", *words])
    with pytest.raises(SystemExit) as done:
        cli.main()
    streams = capsys.readouterr()
    return int(done.value.code or 0), streams.out, " ".join(streams.err.split())
