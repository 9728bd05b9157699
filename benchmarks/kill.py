"""Runs that are killed at random moments and resumed, compared bit for bit with a run that is not disturbed.

    python -m benchmarks.kill [--quick] [--kills N] [--only CONFIGURATION ...]

Every run prunes a small network on scikit-learn's digits in a process forked from this one, which has imported
everything, and writes a checkpoint after every step instead of every minute. It gets SIGKILL in the first 300 ms, after
a stage has begun, or at any moment of its length, is resumed, and has to leave the plan and the weights of the
undisturbed run. A run that ended before the signal does not count and is repeated. Configuration `save` writes two
results over each other; after the signal, one of them has to be there. Finished configurations are kept, so the
benchmark continues where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import compress
from compress.cli.quickstart import Network
from compress.data.named_loaders import digits_datasets
from compress.storage import CheckpointStore
from compress.training import Engine

from . import results

FIRST_MOMENTS = 0.3  # seconds
TRAIN: dict[str, Any] = {"epochs": "4 steps", "lr": 0.02}
FINETUNE: dict[str, Any] = {"epochs": "6 steps", "lr": 0.02}
NETSLIM: dict[str, Any] = {"method": "netslim", **TRAIN}
BASE: dict[str, Any] = {"budget": {"macs": "50%"}, "search": NETSLIM, "finetune": FINETUNE, "timing": {"repeats": 3}}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "netslim": BASE,
    "rarts": {**BASE, "search": {"method": "rarts", **TRAIN, "distill": {}}},
    "taylor, steps: 2": {**BASE, "steps": 2, "search": {"method": "taylor", "epochs": "4 steps"}},
    "bayesnas": {**BASE, "search": {"method": "bayesnas", **TRAIN}},
    "distill": {**BASE, "finetune": {**FINETUNE, "distill": {"temperature": 4, "features": ["stage1"]}}},
    "ema, mixup": {**BASE, "finetune": {**FINETUNE, "ema": 0.9, "mixup": 0.2}},
    "persistent workers": BASE,
    "accumulate: 3": {**BASE, "engine": {"accumulate": 3}},
    "2 processes": {**BASE, "finetune": {**FINETUNE, "distill": {}}},
    "export": {**BASE, "search": {"method": "magnitude"}, "export": {"format": "onnx"}},
    "save": BASE,
}
MOMENTS = ("first 300 ms", "search", "finetune", "any")


class NoisyDigits(Dataset[Any]):
    """Digits with noise from every generator of the process that reads them."""

    def __init__(self) -> None:
        self.data = Subset(digits_datasets()[0], range(160))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        x, y = self.data[i]
        return x + 0.1 * torch.randn(()) + 0.1 * random.random(), y


def make_network() -> nn.Module:
    """Return the network, always with the same weights."""
    torch.manual_seed(0)
    return Network(12).eval()


def make_loaders(name: str) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the loaders of a configuration."""
    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True} if name == "persistent workers" else {}
    return DataLoader(NoisyDigits(), 32, shuffle=True, **workers), DataLoader(
        Subset(digits_datasets()[1], range(120)), 120
    )


def prune(name: str, workdir: Path | None) -> compress.Pruned:
    """Run or resume a configuration."""
    train, val = make_loaders(name)
    return compress.prune(
        make_network(),
        CONFIGURATIONS[name],
        train=train,
        val=val,
        workdir=workdir,
        resume=workdir is not None,
        quiet=True,
    )


def fork(function: Callable[[], object]) -> int:
    """Call a function in a forked process and return its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def wait(children: list[int]) -> list[int]:
    """Return the exit codes of processes."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def start(name: str, workdir: Path) -> list[int]:
    """Start the processes of a run and return their ids."""
    if name != "2 processes":
        return [fork(lambda: prune(name, workdir))]
    meeting = Path(tempfile.mkdtemp(dir=workdir.parent)) / "meeting"

    def join(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
        prune(name, workdir)

    return [fork(lambda rank=rank: join(rank)) for rank in range(2)]  # type: ignore[misc]


def digest(folder: Path) -> str:
    """Return a hash of the plan and the weights."""
    return hashlib.sha256(b"".join((folder / n).read_bytes() for n in ("plan.json", "model.safetensors"))).hexdigest()


def stage_in(workdir: Path) -> str:
    """Return what a run has written so far."""
    if (workdir / "report.json").exists():
        return "result saved"
    if (workdir / "plan.json").exists():
        return "saving"
    checkpoint = None
    with contextlib.suppress(ValueError, OSError):  # it is being replaced
        checkpoint = CheckpointStore(workdir).load()
    if checkpoint is not None:
        return str(checkpoint[1]["stage"])
    return "before the first checkpoint" if (workdir / "run.json").exists() else "before run.json"


def wait_for(condition: Callable[[], bool], limit: float) -> None:
    """Wait until a condition holds, or a time limit."""
    begin = time.monotonic()
    while time.monotonic() - begin < limit and not condition():
        time.sleep(0.002)


def kill_run(name: str, moment: str, folder: Path, duration: float, draw: random.Random) -> dict[str, Any] | None:
    """Kill a run, resume it and return what came out; None if it ended before."""
    workdir = folder / f"run{draw.getrandbits(40)}"
    children = start(name, workdir)
    if moment == "first 300 ms":
        wait_for(workdir.exists, duration)
        delay = draw.random() * FIRST_MOMENTS
    elif moment == "any":
        delay = draw.random() * duration
    else:
        wait_for(lambda: stage_in(workdir) in (moment, "saving", "result saved"), 4 * duration)
        delay = draw.random() * duration / 4
    time.sleep(delay)
    victims = children if len(children) == 1 or draw.random() < 0.5 else [draw.choice(children)]
    for child in victims:  # of two processes, both or one: the other one notices
        os.kill(child, signal.SIGKILL)
    codes = wait(children)
    if -signal.SIGKILL not in codes:
        return None
    where = stage_in(workdir)
    resumed = wait(start(name, workdir))
    same = resumed == [0] * len(resumed) and digest(workdir) == digest(folder / "undisturbed")
    leftovers = sorted(p.name for p in workdir.iterdir() if p.name.startswith(".") or "checkpoint" in p.name)
    if same and not leftovers:
        shutil.rmtree(workdir)
    return {"moment": moment, "delay": delay, "where": where, "same": same, "leftovers": leftovers}


def kill_save(folder: Path, delay: float) -> dict[str, Any] | None:
    """Kill a process that saves two results over each other; return what a reader finds."""
    target = folder / "saved"
    pair = [
        compress.prune(
            make_network(),
            {**BASE, "search": {"method": "random"}, "finetune": None, "seed": s},
            example_inputs=torch.zeros(2, 1, 8, 8),
            quiet=True,
        )
        for s in (0, 1)
    ]
    expected = set()
    for result in pair:
        result.save(target)
        expected.add(digest(target))

    def save_on_and_on() -> None:
        while True:
            for result in pair:
                result.save(target)

    child = fork(save_on_and_on)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    wait([child])
    readable = digest(compress.storage.find_saved(target)) in expected
    pair[0].save(target)
    leftovers = sorted(p.name for p in folder.iterdir() if p.name.startswith("."))
    return {"moment": "any", "delay": delay, "where": "saving", "same": readable, "leftovers": leftovers}


def run_configuration(name: str, kills: int) -> list[dict[str, Any]]:
    """Return one row for each kill of a configuration."""
    draw, rows = random.Random(name), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        begin = time.monotonic()
        if name != "save":
            assert wait(start(name, folder / "undisturbed")) == [0] * (1 + (name == "2 processes"))
        duration = time.monotonic() - begin
        moments = [m for m in MOMENTS if not (m == "search" and name == "export")]
        for attempt in range(3 * kills):
            if len(rows) == kills:
                break
            moment = moments[attempt % len(moments)]
            row = kill_save(folder, draw.random()) if name == "save" else kill_run(name, moment, folder, duration, draw)
            if row is not None:
                rows.append({"configuration": name, **row})
                verdict = "same" if row["same"] and not row["leftovers"] else f"DIFFERENT {row}"
                print(f"{name} {len(rows)}/{kills}: {row['moment']}, {row['where']}: {verdict}", flush=True)
    return rows


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Build the tables: by configuration, and by what the killed run had written."""
    rows = content["rows"]

    def count(key: str) -> list[list[str]]:
        lines = []
        for value in dict.fromkeys(row[key] for row in rows):
            chosen = [row for row in rows if row[key] == value]
            same, clean = sum(r["same"] for r in chosen), sum(not r["leftovers"] for r in chosen)
            lines.append([str(value), str(len(chosen)), str(same), str(clean)])
        same, clean = sum(r["same"] for r in rows), sum(not r["leftovers"] for r in rows)
        return [*lines, ["**all**", f"**{len(rows)}**", f"**{same}**", f"**{clean}**"]]

    columns = ("kills", "same bits after resuming", "no leftovers")
    return [
        results.ResultTable(("configuration", *columns), count("configuration")),
        results.ResultTable(("killed when it had reached", *columns), count("where")),
    ]


def main() -> int:
    parser = results.make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=220, help="in all")
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    Engine.checkpoint_is_due = lambda self: True  # type: ignore[method-assign]
    prune("netslim", None)  # imports everything
    name = results.result_name("kill", options.quick)
    per_configuration = 2 if options.quick else -(-options.kills // len(CONFIGURATIONS))
    rows = [] if options.quick else results.load(name).get("rows", [])
    for configuration in options.only:
        if sum(row["configuration"] == configuration for row in rows) < per_configuration:
            rows = [row for row in rows if row["configuration"] != configuration]
            rows += run_configuration(configuration, per_configuration)
            results.save(name, {"rows": rows})
    results.publish(name, tables({"rows": rows}))
    return int(not all(row["same"] and not row["leftovers"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
