"""The output of commands: pipes that are closed, terminals without some characters, names with control characters."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compress.cli.output import BROKEN_PIPE, robust_output
from helpers.commands import run

ROOT = Path(__file__).parents[2]
PREVIEW = "preview --model helpers.exported_runs:small_network --input 1,1,8,8 --recipe magnitude_half"


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash with PROGRAM and the variables set."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"} | variables
    line = command.replace("PROGRAM", f"{sys.executable} -m compress")
    return subprocess.run(["bash", "-c", line], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("words", ["recipes", "recipes --schema", PREVIEW, "prune --help"])
def test_a_pipe_that_is_closed_ends_the_command_quietly(words: str) -> None:
    result = shell(f"PROGRAM {words} | true; exit ${{PIPESTATUS[0]}}")
    assert (result.returncode, "Traceback" in result.stderr, "Error" in result.stderr) == (141, False, False)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_some_characters_gets_similar_ones(encoding: str) -> None:
    result = shell(f"PROGRAM {PREVIEW}", PYTHONIOENCODING=encoding)
    assert result.returncode == 0, result.stderr
    assert "####" in result.stdout


def test_a_run_on_a_terminal_of_ascii_ends_well(tmp_path: Path) -> None:
    words = PREVIEW.replace("preview", "prune")
    result = shell(f"PROGRAM {words} --workdir {tmp_path / 'out'}", PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert " +- " in result.stdout and (tmp_path / "out" / "plan.json").exists()


def test_streams_that_are_closed_are_no_problem() -> None:
    assert shell("PROGRAM recipes >&-").returncode == 0
    assert shell("PROGRAM recipes quickstart 2>&-").returncode == 0


def test_the_plain_locale_of_c_is_enough() -> None:
    result = shell(f"PROGRAM {PREVIEW}", LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("text", "encoding", "expected"),
    [
        ("0.66 ± 0.14 █░", "ascii", b"0.66 +- 0.14 #."),
        ("0.66 ± 0.14", "latin-1", b"0.66 \xb1 0.14"),
        ("層 \udcff", "ascii", b"\\u5c64 \\udcff"),
        ("a \udcff", "utf-8", b"a \\udcff"),
    ],
)
def test_characters_that_an_encoding_lacks_are_replaced(
    text: str, encoding: str, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    with robust_output():
        print(text, end="")
    assert raw.getvalue() == expected
    assert sys.stdout is stream and stream.errors == "strict"


def test_the_streams_are_robust_only_during_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    broken = Broken()
    monkeypatch.setattr(sys, "stdout", broken)
    with pytest.raises(SystemExit) as end, robust_output():
        print("text")
    assert end.value.code == BROKEN_PIPE and sys.stdout is broken


FACTORY = """
from collections import OrderedDict
from torch import nn

def make():
    layers = OrderedDict()
    layers["a\\x1b[31m[red]"] = nn.Conv2d(3, 8, 3)
    layers["b\\x9b"] = nn.Conv2d(8, 8, 3)
    layers["c\\u202e"] = nn.Conv2d(8, 4, 3)
    return nn.Sequential(layers)
"""


def test_control_characters_in_names_are_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "names_with_escapes.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    words = ["preview", "--model", "names_with_escapes:make", "--input", "1,3,9,9", "--recipe"]
    code, out, err = run(monkeypatch, capsys, *words, "magnitude_half")
    assert code == 0, err
    assert "a\\x1b[31m[red]" in out and "b\\x9b" in out
    (tmp_path / "impossible.yaml").write_text("budget: {macs: 50%}\ntarget: {include: [nothing]}\n")
    failed, _, message = run(monkeypatch, capsys, *words, "impossible.yaml")
    assert failed == 2 and "\\x1b" in message + out
    assert not {"\x1b", "\x9b", "\u202e"} & set(out + message + err)


def test_an_interrupt_in_a_command_exits_130_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "interrupted_factory.py").write_text("def make():\n    raise KeyboardInterrupt\n")
    monkeypatch.chdir(tmp_path)
    words = ["preview", "--model", "interrupted_factory:make", "--recipe", "magnitude_half"]
    assert run(monkeypatch, capsys, *words) == (130, "", "interrupted")
