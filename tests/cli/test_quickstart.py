"""`compress quickstart` keeps its promises."""

import subprocess
import sys

from helpers.commands import run


def test_quickstart_keeps_every_promise(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "compress", "quickstart", "--workdir", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("passed") == 4
    assert "BROKEN" not in done.stdout
    assert (tmp_path / "out" / "report.html").exists()


def test_quickstart_refuses_a_used_folder_before_it_trains(monkeypatch, capsys, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    code, out, err = run(monkeypatch, capsys, "quickstart", "--workdir", str(tmp_path))
    assert code == 2
    assert "expected an empty or missing directory, because the quickstart cannot be resumed; choose another" in err
    assert "train a residual network" not in out
