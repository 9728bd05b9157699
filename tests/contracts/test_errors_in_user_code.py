"""Errors in a user's own code: the commands show the type and the line, and the traceback on request."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.commands import run

MINE = """
import torch
from torch.utils.data import DataLoader, Dataset
from compress.cli.quickstart import Network

class Pictures(Dataset):
    def __init__(self, error):
        self.error = error
    def __len__(self):
        return 8
    def __getitem__(self, i):
        raise self.error

def loaders(error):
    return DataLoader(Pictures(error), 4), None

def silent():
    return loaders(ValueError())

def short():
    return loaders(OSError("x"))

def key():
    return loaders(KeyError(17))

def factory():
    raise ValueError("no such table")

class Wrong(Network):
    def forward(self, x):
        return super().forward(x[None])
"""
RECIPE = "budget: {macs: 50%}\nsearch: {method: taylor, epochs: 3 steps}\ntiming: {repeats: 3}\n"
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def prune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MINE)

    def call(*words: str, more: str = "", model: str = "compress.cli.quickstart:Network") -> tuple[int, str]:
        (tmp_path / "r.yaml").write_text(RECIPE + more)
        base = ["--model", model, "--recipe", "r.yaml", "--workdir", str(tmp_path / "out")]
        code, _, err = run(monkeypatch, capsys, "prune", *base, *words)
        return code, err

    return call


def line(text: str) -> int:
    return 1 + next(i for i, found in enumerate(MINE.splitlines()) if text in found)


@pytest.mark.parametrize(("name", "text"), [("silent", "ValueError"), ("short", "OSError: x"), ("key", "KeyError: 17")])
def test_error_in_a_dataset_has_its_type_and_line(prune: Command, name: str, text: str) -> None:
    code, err = prune("--data", f"mine:{name}")
    assert code == 2
    assert f"{text} (mine.py:{line('raise self.error')}) Add --traceback to see the traceback" in err


def test_error_in_a_factory_of_data_or_tasks_has_its_type_and_line(prune: Command) -> None:
    wanted = f"ValueError: no such table (mine.py:{line('no such table')})"
    for words in (["--data", "mine:factory"], ["--task", "mine:factory"]):
        code, err = prune(*words)
        assert code == 2
        assert wanted in err
        assert "Expected package.module:factory" not in err


def test_error_in_a_model_has_the_line_of_the_users_file(prune: Command) -> None:
    code, err = prune("--data", "digits", model="mine:Wrong")
    assert code == 2
    assert "the model does not run on the first training batch: RuntimeError: Expected 3D" in err
    assert err.endswith(f"(mine.py:{line('x[None]')})")


def test_traceback_shows_all_of_it(prune: Command) -> None:
    code, err = prune("--data", "mine:key", "--traceback")
    assert code == 2
    assert "Traceback (most recent call last)" in err
    assert "raise self.error KeyError: 17" in err
    assert "--traceback shows" not in err
