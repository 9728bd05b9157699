"""What checkpoints and tracking cost, and whether two processes are as fast as one with as many threads.

    python -m benchmarks.engine [--quick] [cost] [processes] [--minutes 4] [--repeats 5]

ResNet-20 on images of CIFAR-10's size. `cost` runs netslim with a working directory and TensorBoard at the default
interval, and adds up the time inside of both. `processes` makes the same netslim steps on 128 images, in one process
with two threads and in two on gloo with one thread each, in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.engine import Engine
from compress.processes import join, rank, world

from . import results
from .models import CifarResNet

STEPS, FEW, BATCH = 30, 6, 128  # FEW: of a quick run


def images(count: int) -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 3, 32, 32, generator=random), torch.randint(0, 10, (count,)))


def cost(minutes: float, least: int) -> dict[str, Any]:
    spent = {"checkpoints": 0.0, "tracking": 0.0}
    counts = {"checkpoints": 0, "tracking": 0}

    def timed(name: str, method: str) -> None:
        original = getattr(Engine, method)

        def call(self: Engine, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = original(self, *args, **kwargs)
            spent[name] += time.perf_counter() - start
            counts[name] += 1
            return found

        setattr(Engine, method, call)

    timed("checkpoints", "save")
    timed("tracking", "record")
    model, loader = CifarResNet(20), DataLoader(images(2048), BATCH, shuffle=True)
    probe = {"budget": {"macs": "50%"}, "search": {"method": "netslim", "epochs": f"{least} steps"}}
    start = time.perf_counter()
    compress.prune(model, probe, train=loader, quiet=True)
    each = (time.perf_counter() - start) / least
    steps = max(least, int(60 * minutes / each))
    recipe = {
        **probe,
        "search": {"method": "netslim", "epochs": f"{steps} steps"},
        "engine": {"track": ["tensorboard"]},
    }
    for name in spent:
        spent[name], counts[name] = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        compress.prune(model, recipe, train=loader, workdir=Path(folder) / "out", quiet=True)
        whole = time.perf_counter() - start
    parts = {name: seconds / whole for name, seconds in spent.items()}
    return {"steps": steps, "seconds": whole, "counts": counts, "part": parts, "together": sum(parts.values())}


def steps(count: int) -> None:
    """Make the steps in this process and its peers; the first prints how long they took."""
    join(cpu=True)
    torch.set_num_threads(2 // world())
    recipe = {
        "budget": {"macs": "50%"},
        "search": {"method": "netslim", "epochs": f"{count} steps"},
        "timing": {"repeats": 3},
    }
    loader = DataLoader(images(2048), BATCH // world(), shuffle=True)
    compress.prune(
        CifarResNet(20),
        {**recipe, "search": {"method": "netslim", "epochs": f"{min(5, count)} steps"}},
        train=loader,
        quiet=True,
    )
    found = compress.prune(CifarResNet(20), recipe, train=loader, quiet=True)
    if rank() == 0:
        print(json.dumps(found.report.seconds["search"]))


def processes(repeats: int, count: int) -> dict[str, Any]:
    one = [sys.executable, "-m", "benchmarks.engine", "steps", *["--quick"] * (count == FEW)]
    two = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *one[1:]]
    seconds: dict[str, list[float]] = {"one": [], "two": []}
    for _ in range(repeats):
        for name, command, threads in (("one", one, "2"), ("two", two, "1")):
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": threads}
            )
            seconds[name].append(float(done.stdout.splitlines()[-1]))
    ratios = [a / b for a, b in zip(seconds["one"], seconds["two"], strict=True)]
    return {
        "steps": count,
        "images_in_a_step": BATCH,
        "images_per_second": {name: count * BATCH / median(values) for name, values in seconds.items()},
        "throughput_of_two": median(ratios),
        "each": ratios,
    }


def main() -> None:
    parser = results.options_of(__doc__)
    parser.add_argument("what", nargs="*", help="cost, processes; both if none is named; steps: worker")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    count = FEW if options.quick else STEPS
    if options.what == ["steps"]:
        return steps(count)
    minutes, repeats = (0.1, 1) if options.quick else (options.minutes, options.repeats)
    runs = {"cost": lambda: cost(minutes, count), "processes": lambda: processes(repeats, count)}
    file = results.named("engine", options.quick)
    for name in options.what or runs:
        results.save(file, results.load(file) | {name: runs[name]()})
    return results.show(file, sheets(results.load(file)))


def sheets(content: dict[str, Any]) -> list[results.Sheet]:
    found, lines = {name: content.get(name) for name in ("cost", "processes")}, []
    if cost := found["cost"]:
        lines.append(["steps of the run", str(cost["steps"])])
        lines += [[f"part of its time: {name}", f"{part:.2%}"] for name, part in cost["part"].items()]
    if both := found["processes"]:
        speeds = both["images_per_second"]
        lines.append(["images a second: one process, two threads", f"{speeds['one']:.0f}"])
        lines.append(["images a second: two processes, a thread each", f"{speeds['two']:.0f}"])
        low, high = min(both["each"]), max(both["each"])
        lines.append(["two against one", f"{both['throughput_of_two']:.2f} ({low:.2f} to {high:.2f})"])
    return [results.Sheet(("ResNet-20, netslim", "measured"), lines)]


if __name__ == "__main__":
    main()
