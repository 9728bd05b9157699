"""Kill a run at every operation that changes its working directory: `python -m helpers.killed_writes FOLDER`.

Prints a JSON list with one entry for each operation: what it was, and what the resumed run left.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import compress
from compress.training.engine import Engine
from helpers.digits import FINETUNE, RECIPE, dense, loaders

OPERATIONS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate", "os.link", "shutil.rmtree"}
SHORT: dict[str, Any] = {
    **RECIPE,
    "search": {**RECIPE["search"], "epochs": "2 steps"},
    "finetune": {**FINETUNE, "epochs": "2 steps"},
    "timing": {"repeats": 3},
}


def watch_writes(folder: Path, report: Callable[[str, int | None], None]) -> None:
    """Call `report` before every operation of this process that changes a folder, with its descriptor if it has one."""

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            if str(arguments[0]).startswith(str(folder)):
                report(f"open {Path(str(arguments[0])).name.rpartition('.')[0]}", None)
        elif event in OPERATIONS and not (event == "os.mkdir" and os.path.isdir(arguments[0])):
            report(f"{event} {Path(str(arguments[0])).name}", None)

    sync = os.fsync

    def fsync(descriptor: int) -> None:
        report("fsync", descriptor)
        sync(descriptor)

    os.fsync = fsync
    sys.addaudithook(on_event)


def run(folder: Path, kill_at: int | None = None, resume: bool = True, log: Path | None = None) -> int:
    """Run in a forked process, which kills itself before one of the operations; return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status, operations = 1, []

    def report(operation: str, descriptor: int | None) -> None:
        operations.append(operation)
        if len(operations) - 1 == kill_at:
            if descriptor is not None:  # a write that stopped halfway
                os.truncate(f"/proc/self/fd/{descriptor}", os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        watch_writes(folder, report)
        train, val = loaders(batch=32, count=64)
        compress.prune(dense(), SHORT, train=train, val=val, workdir=folder, resume=resume, quiet=True)
        status = 0
        if log is not None:
            log.write_text(json.dumps(operations))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def digest(folder: Path) -> str:
    """Return a hash of the plan and the weights."""
    plan, weights = (folder / "plan.json").read_bytes(), (folder / "model.safetensors").read_bytes()
    return hashlib.sha256(plan + weights).hexdigest()


def main(folder: Path) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    Engine.checkpoint_is_due = lambda self: True  # type: ignore[method-assign]  # a checkpoint after every step
    train, val = loaders(batch=32, count=64)
    compress.prune(dense(), SHORT, train=train, val=val, workdir=folder / "first", quiet=True)  # imports everything
    assert run(folder / "undisturbed", log=folder / "operations.json") == 0
    operations, expected = json.loads((folder / "operations.json").read_text()), digest(folder / "undisturbed")
    first_save = operations.index("open .checkpoint.safetensors")
    entries = []
    for i, operation in enumerate(operations):
        workdir = folder / f"killed{i}"
        codes = [run(workdir, kill_at=i)]
        if i % 3 == 0:
            codes.append(run(workdir, kill_at=i % 7))  # the resumed run is killed, too
        codes.append(run(workdir, resume=i > first_save))  # with nothing to resume, the same command works again
        same = codes[-1] == 0 and digest(workdir) == expected
        files = sorted(path.name for path in workdir.iterdir())
        entries.append({"operation": operation, "codes": codes, "same": same, "files": files})
    return entries


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]).resolve())))
