"""Cost of checkpoints and tracking, and throughput of two processes compared with one process with two threads.

    python -m benchmarks.engine [--quick] [cost] [processes] [--minutes 4] [--repeats 5]

ResNet-20 on random images of CIFAR-10's size. `cost` runs netslim with a working directory and with TensorBoard at the
default interval, and sums the time spent in both. `processes` runs the same netslim steps on 128 images in one process
with two threads and in two gloo processes with one thread each, alternately.
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
from compress.distributed import init_process_group, rank, world_size
from compress.training import Engine

from . import results
from .models import CifarResNet

STEPS, QUICK_STEPS, BATCH = 30, 6, 128  # QUICK_STEPS: with --quick


def random_images(count: int) -> TensorDataset:
    """Return random images and labels of CIFAR-10's size."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 3, 32, 32, generator=generator), torch.randint(0, 10, (count,)))


def measure_overhead(minutes: float, min_steps: int) -> dict[str, Any]:
    """Measure the share of time that checkpoints and tracking take in a run of the given length."""
    seconds_in = {"checkpoints": 0.0, "tracking": 0.0}
    counts = {"checkpoints": 0, "tracking": 0}

    def timed(name: str, method: str) -> None:
        original = getattr(Engine, method)

        def call(self: Engine, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = original(self, *args, **kwargs)
            seconds_in[name] += time.perf_counter() - start
            counts[name] += 1
            return result

        setattr(Engine, method, call)

    timed("checkpoints", "save")
    timed("tracking", "record")
    model, loader = CifarResNet(20), DataLoader(random_images(2048), BATCH, shuffle=True)
    probe = {"budget": {"macs": "50%"}, "search": {"method": "netslim", "epochs": f"{min_steps} steps"}}
    start = time.perf_counter()
    compress.prune(model, probe, train=loader, quiet=True)
    seconds_per_step = (time.perf_counter() - start) / min_steps
    num_steps = max(min_steps, int(60 * minutes / seconds_per_step))
    recipe = {
        **probe,
        "search": {"method": "netslim", "epochs": f"{num_steps} steps"},
        "engine": {"track": ["tensorboard"]},
    }
    for name in seconds_in:
        seconds_in[name], counts[name] = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        compress.prune(model, recipe, train=loader, workdir=Path(folder) / "out", quiet=True)
        total = time.perf_counter() - start
    fractions = {name: seconds / total for name, seconds in seconds_in.items()}
    return {
        "steps": num_steps,
        "seconds": total,
        "counts": counts,
        "part": fractions,
        "together": sum(fractions.values()),
    }


def run_worker(count: int) -> None:
    """Run the search in this process group; rank 0 prints its seconds."""
    init_process_group(cpu=True)
    torch.set_num_threads(2 // world_size())
    recipe = {
        "budget": {"macs": "50%"},
        "search": {"method": "netslim", "epochs": f"{count} steps"},
        "timing": {"repeats": 3},
    }
    loader = DataLoader(random_images(2048), BATCH // world_size(), shuffle=True)
    compress.prune(
        CifarResNet(20),
        {**recipe, "search": {"method": "netslim", "epochs": f"{min(5, count)} steps"}},
        train=loader,
        quiet=True,
    )
    pruned = compress.prune(CifarResNet(20), recipe, train=loader, quiet=True)
    if rank() == 0:
        print(json.dumps(pruned.report.seconds["search"]))


def compare_processes(repeats: int, count: int) -> dict[str, Any]:
    """Compare the throughput of one process with two threads and two processes with one."""
    one_process = [sys.executable, "-m", "benchmarks.engine", "steps", *["--quick"] * (count == QUICK_STEPS)]
    two_processes = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *one_process[1:]]
    seconds: dict[str, list[float]] = {"one": [], "two": []}
    for _ in range(repeats):
        for name, command, threads in (("one", one_process, "2"), ("two", two_processes, "1")):
            completed = subprocess.run(
                command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": threads}
            )
            seconds[name].append(float(completed.stdout.splitlines()[-1]))
    ratios = [a / b for a, b in zip(seconds["one"], seconds["two"], strict=True)]
    return {
        "steps": count,
        "images_in_a_step": BATCH,
        "images_per_second": {name: count * BATCH / median(values) for name, values in seconds.items()},
        "throughput_of_two": median(ratios),
        "each": ratios,
    }


def main() -> None:
    parser = results.make_parser(__doc__)
    parser.add_argument("what", nargs="*", help="cost, processes; default: both; steps: run as worker")
    parser.add_argument("--minutes", type=float, default=4, help="length of the run of `cost`")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of `processes`")
    options = parser.parse_args()
    count = QUICK_STEPS if options.quick else STEPS
    if options.what == ["steps"]:
        return run_worker(count)
    minutes, repeats = (0.1, 1) if options.quick else (options.minutes, options.repeats)
    runs = {"cost": lambda: measure_overhead(minutes, count), "processes": lambda: compare_processes(repeats, count)}
    file = results.result_name("engine", options.quick)
    for name in options.what or runs:
        results.save(file, results.load(file) | {name: runs[name]()})
    return results.publish(file, tables(results.load(file)))


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the table of overheads and throughputs."""
    runs, lines = {name: content.get(name) for name in ("cost", "processes")}, []
    if cost := runs["cost"]:
        lines.append(["steps of the run", str(cost["steps"])])
        lines += [[f"share of time: {name}", f"{fraction:.2%}"] for name, fraction in cost["part"].items()]
    if processes := runs["processes"]:
        speeds = processes["images_per_second"]
        lines.append(["images per second: one process with two threads", f"{speeds['one']:.0f}"])
        lines.append(["images per second: two processes with one thread each", f"{speeds['two']:.0f}"])
        low, high = min(processes["each"]), max(processes["each"])
        lines.append(
            [
                "throughput of two processes relative to one",
                f"{processes['throughput_of_two']:.2f} ({low:.2f} to {high:.2f})",
            ]
        )
    return [results.ResultTable(("ResNet-20, netslim", "measured"), lines)]


if __name__ == "__main__":
    main()
