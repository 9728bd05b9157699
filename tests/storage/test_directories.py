"""Directories are replaced as a whole, wherever a save is killed, and the next save cleans up."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from compress.storage import directories

# Events of Python's own audit that change or read the file system.
STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.listdir", "os.scandir")
STEPS += ("shutil.rmtree", "tempfile.mkdtemp", "ctypes.dlsym")


def killed_at_step(step: int, action: Callable[[], None]) -> bool:
    """Run the action in a child that is killed at its n-th step; return whether it came that far."""
    child = os.fork()
    if child == 0:
        steps = 0

        def count(event: str, _: object) -> None:
            nonlocal steps
            if event in STEPS:
                steps += 1
                if steps == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def write(target: Path, text: str) -> None:
    with directories.atomic_directory(target) as folder:
        (folder / "plan.json").write_text(text)
        (folder / "report.json").write_text(text)


def read(target: Path) -> set[str]:
    folder = directories.find_saved(target)
    return {(folder / name).read_text() for name in ("plan.json", "report.json")}


@pytest.fixture(params=["in one step", "in two renames"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    if request.param == "in two renames":
        monkeypatch.setattr(directories, "_exchange", lambda *_: False)
        return "in two renames"
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    can_exchange = directories._exchange(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a").rmdir(), (tmp_path / "b").rmdir()
    if not can_exchange:
        pytest.skip("this file system cannot exchange directories")
    return "in one step"


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.usefixtures("exchange")
def test_wherever_a_save_is_killed_the_old_or_the_new_directory_is_found_and_the_next_save_cleans_up(
    tmp_path: Path,
) -> None:
    target, step = tmp_path / "out", 1
    write(target, "old")
    while killed_at_step(step, lambda: write(target, "new")):
        assert read(target) in ({"old"}, {"new"}), step
        write(target, "old")
        assert [p.name for p in tmp_path.iterdir()] == ["out"], step
        step += 1
    assert step > 12 and read(target) == {"new"}


def test_directories_are_exchanged_in_one_step_on_linux(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("Linux only")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert directories._exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()
    assert not directories._exchange(tmp_path / "a", tmp_path / "missing")


@pytest.mark.usefixtures("exchange")
def test_a_save_that_is_under_way_is_not_taken_for_abandoned(tmp_path: Path) -> None:
    with directories.atomic_directory(tmp_path / "out") as first:
        (first / "plan.json").write_text("first")
        write(tmp_path / "out", "second")
        assert (first / "plan.json").exists()
        (tmp_path / "out" / "report.json").unlink()
    assert (tmp_path / "out" / "plan.json").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_reader_finds_a_directory_while_it_is_replaced_over_and_over(exchange: str, tmp_path: Path) -> None:
    write(tmp_path / "out", "0")
    seen = []

    def look() -> None:
        for _ in range(2000):
            seen.append(directories.find_saved(tmp_path / "out").is_dir())

    reader = threading.Thread(target=look)
    reader.start()
    number = 0
    while reader.is_alive():
        write(tmp_path / "out", str(number := number + 1))
    reader.join()
    # Between two renames a reader may look where the other name was a moment ago.
    assert number and sum(seen) >= (1 if exchange == "in one step" else 0.95) * len(seen)


def test_where_there_are_no_locks_leftovers_of_a_day_ago_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "_lock", lambda *_, **__: None)
    for name, age in (("fresh___", 60), ("stale___", 100_000)):
        folder = tmp_path / f".out.saving-{name}"
        folder.mkdir()
        os.utime(folder, (folder.stat().st_mtime - age,) * 2)
    write(tmp_path / "out", "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.saving-fresh___", "out"]


def test_a_second_rename_that_fails_puts_the_old_directory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", "old")
    monkeypatch.setattr(directories, "_exchange", lambda *_: False)
    rename, renames = os.replace, []

    def fail_second(source: Path, target: Path) -> None:
        renames.append(source)
        if len(renames) == 2:
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(directories.os, "replace", fail_second)
    with pytest.raises(OSError, match="no"):
        write(tmp_path / "out", "new")
    assert read(tmp_path / "out") == {"old"} and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_directory_replaces_the_old_one_only_if_the_block_succeeds(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with directories.atomic_directory(target) as folder:
        (folder / "plan.json").write_text("one")
    with pytest.raises(KeyError), directories.atomic_directory(target) as folder:
        (folder / "plan.json").write_text("two")
        raise KeyError
    assert (target / "plan.json").read_text() == "one"
    with directories.atomic_directory(target) as folder:
        (folder / "report.json").write_text("three")
    assert [p.name for p in target.iterdir()] == ["report.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_directory_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "plan.json").touch()
    directories.check_replaceable(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with (
        pytest.raises(FileExistsError, match=r"it holds other files \(thesis\.tex\)"),
        directories.atomic_directory(tmp_path),
    ):
        pass
    with pytest.raises(FileExistsError, match="expected a directory, found a file"):
        directories.check_replaceable(tmp_path / "thesis.tex")
