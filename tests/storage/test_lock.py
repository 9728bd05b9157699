"""The lock of a working directory: one run at a time, whichever process holds it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compress.storage.lock import LOCK_FILE, lock_directory

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="locks of POSIX systems")
HOLDER = """
import fcntl, os, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write(f"process {os.getpid()} on here"); file.flush()
if os.fork() == 0:
    time.sleep(60)  # as a loader's worker, which lives on a little
print("held", flush=True)
time.sleep(60)
"""


def test_lock_of_another_process_names_it_and_goes_when_it_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / LOCK_FILE)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        text = (
            rf"in use by another run \(process {holder.pid} on here\); wait for it, stop it, or choose another workdir"
        )
        with pytest.raises(FileExistsError, match=text), lock_directory(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with lock_directory(tmp_path):
            assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.stdout.close() if holder.stdout else None
    assert not (tmp_path / LOCK_FILE).exists()


def test_directory_that_the_lock_made_goes_with_it_unless_it_is_used(tmp_path: Path) -> None:
    with lock_directory(tmp_path / "deep" / "new"):
        assert (tmp_path / "deep" / "new" / LOCK_FILE).exists()
    assert not (tmp_path / "deep" / "new").exists()
    with lock_directory(tmp_path / "used"):
        (tmp_path / "used" / "run.json").write_text("{}")
    assert [p.name for p in (tmp_path / "used").iterdir()] == ["run.json"]


def test_file_system_without_locks_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", none)
    with (
        pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\); make sure"),
        lock_directory(tmp_path),
    ):
        assert (tmp_path / LOCK_FILE).exists()


@pytest.mark.parametrize("name", ["link", "link/deep/out"])
def test_a_link_that_leads_nowhere_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    text = r"link: is a link to .*gone, which does not exist; create that directory, remove the link, or choose another"
    with pytest.raises(FileExistsError, match=text), lock_directory(tmp_path / name):
        pass
    assert not (tmp_path / "gone").exists()
