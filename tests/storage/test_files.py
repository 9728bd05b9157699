"""Files and directories appear completely or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from compress.storage import files


def test_a_file_is_replaced_and_the_old_one_kept_if_asked(tmp_path: Path) -> None:
    path, previous = tmp_path / "new" / "plan.json", tmp_path / "new" / "before.json"
    files.write_atomic(path, b"one")
    files.write_atomic(path, b"two", previous)
    assert (path.read_bytes(), previous.read_bytes()) == (b"two", b"one")
    assert sorted(p.name for p in path.parent.iterdir()) == ["before.json", "plan.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    files.write_atomic(path, b"one")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(
        OSError, match=r"plan\.json: cannot be written: .*2\.3 MB.*the existing file is unchanged"
    ) as caught:
        files.write_atomic(path, b"x" * 2_345_678)
    assert caught.value.errno == errno.ENOSPC
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"] and path.read_bytes() == b"one"
