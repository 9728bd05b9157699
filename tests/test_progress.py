"""Progress as lines of JSON."""

import json
import sys

import pytest

from compress.cli import app as cli
from compress.progress import ProgressDisplay
from helpers.commands import RESNET18, run


def test_progress_as_json_is_a_line_for_each_thing_that_happens(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COMPRESS_PROGRESS", "auto")  # put back afterwards
    recipe = tmp_path / "taylor.yaml"
    recipe.write_text("budget: {macs: 50%}\nsearch: {method: taylor, epochs: 3 steps}\ntiming: {repeats: 3}\n")
    words = ["--model", "compress.cli.quickstart:Network", "--data", "digits", "--recipe", str(recipe)]
    monkeypatch.setattr(sys, "argv", ["compress", "prune", *words, "--workdir", str(tmp_path / "out")])
    sys.argv += ["--progress", "json"]
    with pytest.raises(SystemExit):
        cli.main()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["loss"] > 0 for line in lines if line.get("stage") == "search"] == [True] * 3
    assert lines[-1]["time"] >= lines[0]["time"]
    assert any(line.get("doing") == "search" and line["done"] == line["of"] == 3 for line in lines)


def test_progress_of_no_known_form_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COMPRESS_PROGRESS", "auto")  # put back afterwards
    words = ["--recipe", "magnitude_half", "--workdir", str(tmp_path / "out"), "--progress", "loud"]
    code, _, err = run(monkeypatch, capsys, "prune", *RESNET18, *words)
    assert code == 2
    assert "COMPRESS_PROGRESS: expected one of auto, plain, json, off; got 'loud'" in err


def test_messages_show_control_characters_as_escapes(capsys):
    ProgressDisplay().message("\x1b[31m[red]")
    assert capsys.readouterr().err == "\\x1b[31m[red]\n"
