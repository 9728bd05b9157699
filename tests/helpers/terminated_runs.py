"""End the second of two processes by SIGTERM and resume both: `python -m helpers.terminated_runs FOLDER`.

Prints a JSON list: the exit codes of both, stage and step of the last checkpoint, and whether the resumed run left the
same bits.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from compress.storage.checkpoint import CheckpointStore
from compress.training.engine import Engine
from helpers.digits import dense, loaders
from helpers.killed_runs import digest, start, wait


def terminate_in_step(stage: str, step: int) -> None:
    """Patch the engine to send SIGTERM to rank 1 while it takes a step; in the processes that are forked later."""
    original, is_sent = Engine.move, False

    def move(self: Engine, batch: Any) -> Any:
        nonlocal is_sent
        here = self.run_state.stage == stage and self.location.startswith(f", after step {step - 1} of")
        if here and not is_sent and dist.get_rank() == 1:
            is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch)

    Engine.move = move  # type: ignore[method-assign]


def main(folder: Path) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    dense(), loaders()  # made once, before the children are
    assert wait(start(folder / "whole", 2, folder / "meeting")) == [0, 0]
    entries, original = [], Engine.move
    for stage, step in (("search", 2), ("finetune", 5)):
        workdir = folder / stage
        terminate_in_step(stage, step)
        codes = wait(start(workdir, 2, folder / f"{stage}-meeting"))
        Engine.move = original  # type: ignore[method-assign]
        found = CheckpointStore(workdir).load()
        assert found is not None
        where = [found[1]["stage"], found[1].get("done")]
        again = wait(start(workdir, 2, folder / f"{stage}-meeting-again"))
        same = again == [0, 0] and digest(workdir) == digest(folder / "whole")
        entries.append({"codes": codes, "where": where, "same": same})
    return entries


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
