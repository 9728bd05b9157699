"""Kill runs at random moments and resume them: `python -m helpers.killed_runs PROCESSES POINTS FOLDER`.

Prints a JSON list with one entry for each point: when and where the run was killed, and what the resumed run left.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import compress
from compress.storage.checkpoint import CheckpointStore
from compress.training.engine import Engine
from helpers.digits import FINETUNE, RECIPE, dense, loaders


def recipe(processes: int) -> dict[str, Any]:
    """Return a recipe with two rounds, a few steps each."""
    rarts = {"method": "rarts", "epochs": "8 steps", "lr": 0.02, "distill": {}}
    return {
        **RECIPE,
        "steps": 2,
        "search": rarts if processes == 1 else {**RECIPE["search"], "epochs": "6 steps"},
        "finetune": {**FINETUNE, "epochs": "10 steps", "ema": 0.9, "mixup": 0.2},
        "timing": {"repeats": 3},
    }


def start(folder: Path, processes: int, meeting: Path) -> list[int]:
    """Start a run in forked processes and return their ids."""
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if processes > 1:
                    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes)
                train, val = loaders(batch=32, count=192)
                compress.prune(
                    dense(), recipe(processes), train=train, val=val, workdir=folder, resume=True, quiet=True
                )
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    return children


def wait(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def digest(folder: Path) -> str:
    plan, weights = (folder / "plan.json").read_bytes(), (folder / "model.safetensors").read_bytes()
    return hashlib.sha256(plan + weights).hexdigest()


def stage(folder: Path) -> str:
    """Return the stage of the last checkpoint."""
    checkpoint = CheckpointStore(folder).load()
    return "none" if checkpoint is None else str(checkpoint[1]["stage"])


def wait_for_stage(folder: Path, name: str, limit: float) -> None:
    """Wait until the last checkpoint is of this stage, or a time limit."""
    begin = time.monotonic()
    while time.monotonic() - begin < limit:
        with contextlib.suppress(OSError, ValueError):  # the run may replace the file at this moment
            if (folder / "run.json").exists() and stage(folder) == name:
                return
        time.sleep(0.005)


def main(processes: int, points: int, folder: Path) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    Engine.checkpoint_is_due = lambda self: True  # type: ignore[method-assign]  # a checkpoint after every step
    dense(), loaders()  # made once, before the children are
    begin = time.monotonic()
    codes = wait(start(folder / "undisturbed", processes, folder / "meeting0"))
    duration = time.monotonic() - begin
    assert codes == [0] * processes, codes
    expected, draw = digest(folder / "undisturbed"), random.Random(0)
    entries = []
    for point in range(points):
        workdir = folder / f"point{point}"
        moment = duration * (point + draw.random()) / points
        children = start(workdir, processes, folder / f"meeting{2 * point + 1}")
        if point % 2:  # a busy machine runs at another speed than before: wait for a stage, then a random moment
            wait_for_stage(workdir, ("search", "finetune")[point // 2 % 2], limit=4 * duration)
            moment = duration * draw.random() / points
        time.sleep(moment)
        for child in children:
            os.kill(child, signal.SIGKILL)
        killed = wait(children)
        where = stage(workdir)
        again = wait(start(workdir, processes, folder / f"meeting{2 * point + 2}"))
        assert again == [0] * processes, (point, moment, killed, where, again)
        files = sorted(path.name for path in workdir.iterdir())
        same = digest(workdir) == expected
        entries.append(
            {"moment": moment, "killed": killed, "where": where, "again": again, "same": same, "files": files}
        )
    return entries


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
