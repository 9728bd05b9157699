"""Runs that lose their processes and go on with others: `python -m helpers.elastic_runs FOLDER`.

Prints a JSON list with the weights, losses and messages of each run. With `restart FOLDER`, under `torchrun`, the
second process kills itself unless it was restarted; with `whole FOLDER` it does not.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import compress
from compress.distributed import is_restarted, rank, world_size
from compress.training.engine import Engine
from helpers.killed_writes import digest

BATCH = 8
CASES = [  # processes before and after, accumulate, length, whether the loader shards the data itself
    (2, 1, 1, "6 steps", False),
    (1, 2, 2, 2, False),
    (4, 2, 1, 3, False),
    (2, 1, 1, 2, True),
    (3, 2, 1, 2, False),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(128, 4)
    return nn.Sequential(*layers).double()


def loader(shards_itself: bool = False) -> DataLoader[Any]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(96, 3, 8, 8, generator=random, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(0, 4, (96,), generator=random))
    sampler: Any = DistributedSampler(data, world_size(), rank()) if shards_itself else None
    return DataLoader(data, BATCH, shuffle=sampler is None, sampler=sampler)


def recipe(accumulate: int, length: Any) -> dict[str, Any]:
    training = {"epochs": length, "lr": 0.01, "clip": 1.0}
    return {
        "budget": {"macs": "60%"},
        "search": {"method": "netslim", **training},
        "finetune": {**training, "distill": {}, "ema": 0.9},
        "engine": {"accumulate": accumulate},
        "timing": {"repeats": 3},
    }


def kill_after(saves: int) -> None:
    """Kill this process after it took part in so many checkpoints."""
    save = Engine.save

    def counted(self: Engine, *args: Any) -> None:
        nonlocal saves
        save(self, *args)
        saves -= 1
        if not saves:
            os.kill(os.getpid(), signal.SIGKILL)

    Engine.save = counted  # type: ignore[method-assign]


def prune(folder: Path, accumulate: int, length: Any, shards_itself: bool = False) -> dict[str, Any]:
    messages = io.StringIO()
    with contextlib.redirect_stderr(messages):
        pruned = compress.prune(
            network(), recipe(accumulate, length), train=loader(shards_itself), workdir=folder, resume=True
        )
    weights = [p.flatten().tolist() for p in pruned.model.parameters()]
    history = [(h["stage"], h["step"], h["loss"]) for h in pruned.report.history if "loss" in h]
    return {"weights": weights, "history": history, "messages": " ".join(messages.getvalue().split())}


def launch(processes: int, folder: Path, kill: int | None, *arguments: Any) -> list[int]:
    """Run in forked processes and return their exit codes; rank 0 writes FOLDER.json."""
    meeting, children = folder.with_suffix(f".meeting{kill}"), []
    for number in range(processes):
        if child := os.fork():
            children.append(child)
            continue
        status = 1
        try:
            if processes > 1:
                dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=processes)
            if kill is not None:
                kill_after(kill)
            result = prune(folder, *arguments)
            if number == 0:
                folder.with_suffix(".json").write_text(json.dumps(result))
            status = 0
        except BaseException:
            if kill is None:
                traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(folder: Path) -> list[dict[str, Any]]:
    """Return for each case the run that goes on as it was started, and the one that was killed and changed."""
    entries = []
    for i, (before, after, *arguments) in enumerate(CASES):
        whole = folder / f"whole{i}"
        assert launch(before, whole, None, *arguments) == [0] * before
        changed = folder / f"changed{i}"
        codes = launch(before, changed, (2, 8)[i % 2], *arguments)
        assert codes == [-signal.SIGKILL] * before, codes
        assert launch(after, changed, None, *arguments) == [0] * after, (before, after)
        runs = [json.loads(path.with_suffix(".json").read_text()) for path in (whole, changed)]
        entries.append({"case": [before, after], "whole": runs[0], "changed": runs[1]})
    return entries


if __name__ == "__main__":
    torch.set_num_threads(1)
    Engine.checkpoint_is_due = lambda self: True  # type: ignore[method-assign]  # a checkpoint after every step
    if sys.argv[1] in ("restart", "whole"):
        target = Path(sys.argv[2])
        if sys.argv[1] == "restart" and not is_restarted() and os.environ["RANK"] == "1":
            kill_after(3)
        compress.prune(network(), recipe(1, "6 steps"), train=loader(), workdir=target, quiet=True)
        if rank() == 0:
            print(json.dumps({"restarted": is_restarted(), "digest": digest(target)}), flush=True)
    else:
        print(json.dumps(main(Path(sys.argv[1]))))
