"""Killed at any moment, a run that is resumed ends with the same bits: one process, and two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

CODE = """
    import hashlib, json, os, random, signal, sys, time, traceback
    from pathlib import Path
    import torch
    from torch import distributed as dist
    torch.set_num_threads(1)
    import compress
    from compress import engine
    from digits import FINETUNE, RECIPE, dense, loaders
    engine.Engine._due = lambda self: True  # a checkpoint after every step
    dense(), loaders()  # made once, before the children are
    PROCESSES, POINTS, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    SEARCH = dict(method="rarts", epochs="8 steps", lr=0.02, distill={}) if PROCESSES == 1 else None
    FULL = {
        **RECIPE,
        "steps": 2,
        "search": SEARCH or {**RECIPE["search"], "epochs": "6 steps"},
        "finetune": {**FINETUNE, "epochs": "10 steps", "ema": 0.9, "mixup": 0.2},
        "timing": {"repeats": 3},
    }

    def run(folder, rank, meeting):
        if PROCESSES > 1:
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=PROCESSES)
        train, val = loaders(batch=32, count=192)
        compress.prune(dense(), FULL, train=train, val=val, workdir=folder, resume=True, quiet=True)

    def start(folder, number):
        children = []
        for rank in range(PROCESSES):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    run(folder, rank, FOLDER / f"meeting{number}")
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children.append(pid)
        return children

    def wait(children):
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]

    def digest(folder):
        plan, weights = (folder / "plan.json").read_bytes(), (folder / "model.safetensors").read_bytes()
        return hashlib.sha256(plan + weights).hexdigest()

    def stage(folder):
        found = engine.Store(folder).load()
        return "none" if found is None else found[1]["stage"]

    begin = time.monotonic()
    codes = wait(start(FOLDER / "undisturbed", 0))
    whole = time.monotonic() - begin
    assert codes == [0] * PROCESSES, codes
    expected, random_ = digest(FOLDER / "undisturbed"), random.Random(0)
    told = []
    for point in range(POINTS):
        folder = FOLDER / f"point{point}"
        moment = whole * (point + random_.random()) / POINTS
        children = start(folder, 2 * point + 1)
        time.sleep(moment)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        killed = wait(children)
        where = stage(folder)
        again = wait(start(folder, 2 * point + 2))
        assert again == [0] * PROCESSES, (point, moment, killed, where, again)
        left = sorted(p.name for p in folder.iterdir())
        same = digest(folder) == expected
        told.append(dict(moment=moment, killed=killed, where=where, again=again, same=same, left=left))
    print(json.dumps(told))
"""


def _killed(processes: int, points: int, folder: Path) -> list[dict[str, Any]]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(CODE))
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    done = subprocess.run(
        [sys.executable, str(script), str(processes), str(points), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
@pytest.mark.parametrize(("processes", "points"), [(1, 20), (2, 4)])
def test_killed_anywhere_it_ends_with_the_same_bits(processes: int, points: int, tmp_path: Path) -> None:
    found = _killed(processes, points, tmp_path)
    for point in found:
        assert point["again"] == [0] * processes, point
        assert point["same"], point
        assert point["left"] == ["model.safetensors", "plan.json", "report.html", "report.json", "run.json"]
    killed = [point for point in found if -9 in point["killed"]]
    assert len(killed) >= points // 2
    assert len({point["where"] for point in killed}) >= 2  # stages, not always the same
