"""Ctrl-C while the command line is still being imported ends it in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INTERRUPTED_IMPORT = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX systems")


def start(folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start Python with a module that interrupts its own import."""
    (folder / f"{module}.py").write_text(INTERRUPTED_IMPORT)
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it in background jobs
    )


@pytest.mark.parametrize("module", ["torch", "typer"])
@pytest.mark.parametrize("program", ["script", "module"])
def test_an_interrupt_during_the_imports_exits_130_in_one_line(module: str, program: str, tmp_path: Path) -> None:
    script = tmp_path / "bin" / "compress"
    script.parent.mkdir()
    script.write_text("from compress.cli.app import main\nmain()\n")
    words = [str(script)] if program == "script" else ["-m", "compress"]
    result = start(tmp_path, module, *words, "recipes")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_an_interrupt_of_another_program_that_imports_the_library_is_its_own(tmp_path: Path) -> None:
    program = "try:\n    import compress\nexcept KeyboardInterrupt:\n    print('mine')\n"
    assert start(tmp_path, "torch", "-c", program).stdout == "mine\n"


def test_ignored_interrupts_stay_ignored(tmp_path: Path) -> None:
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.argv[0] = 'compress'\n"
    program += "import compress; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    assert start(tmp_path, "unused", "-c", program).stdout == "True\n"
