"""Cost of checkpoints and tracking; throughput and memory of two processes compared with plain DDP and one process.

    python -m benchmarks.engine [--quick] [cost] [processes] [--minutes 4]

`cost` runs netslim on ResNet-20, on random images of CIFAR-10's size, with a working directory and with TensorBoard at
the default interval, and sums the time spent in both. `processes` makes the same steps in two gloo processes with one
thread each: fine-tuning and searches as they are, with one message after the backward pass as it was before, and a loop
with DistributedDataParallel written by hand; and in one process with two threads. All take turns in one run. Then it
measures the peak memory of fine-tuning with FSDP2 and without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.distributed import rank
from compress.training import Engine

from . import results
from .engine_processes import measure_memory, measure_steps
from .models import CifarResNet

STEPS, QUICK_STEPS, BATCH = 30, 6, 128  # QUICK_STEPS: with --quick
ROUNDS, STEPS_PER_ROUND = 5, 1
COMPARED = [
    ("fine-tuning", "plain DDP"),
    ("fine-tuning", "fine-tuning, before"),
    ("netslim", "netslim, before"),
    ("rarts", "rarts, before"),
    ("fine-tuning", "one process"),
    ("plain DDP", "one process"),
]


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


LAUNCHES: dict[str, dict[str, str]] = {
    "DDP": {},
    "FSDP2": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "_Block",
    },
}


def run_two_processes(worker: str, quick: bool, **variables: str) -> Any:
    """Run this script as worker in two gloo processes with one thread each; return what rank 0 prints."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    launch += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    completed = subprocess.run(
        [*launch, "-m", "benchmarks.engine", worker, *["--quick"] * quick],
        capture_output=True,
        text=True,
        check=True,
        # Threads that wait do not spin, and freed memory is returned, so that the peak is that of living tensors.
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "MALLOC_MMAP_THRESHOLD_": "65536",
            **variables,
        },
    )
    return json.loads(completed.stdout.splitlines()[-1])


def compare_processes(quick: bool) -> dict[str, Any]:
    """Compare steps of two processes: ours, with one message after the backward pass, plain DDP, and one process."""
    seconds = run_two_processes("steps", quick)
    return {
        "seconds": seconds,
        "memory": {name: run_two_processes("memory", quick, **v) for name, v in LAUNCHES.items()},
    }


def main() -> None:
    parser = results.make_parser(__doc__)
    parser.add_argument("what", nargs="*", help="cost, processes; default: both; steps, memory: run as worker")
    parser.add_argument("--minutes", type=float, default=4, help="length of the run of `cost`")
    options = parser.parse_args()
    workers: dict[str, Callable[[], Any]] = {
        "steps": lambda: measure_steps(*((1, 1) if options.quick else (ROUNDS, STEPS_PER_ROUND))),
        "memory": lambda: measure_memory(2),
    }
    if options.what and options.what[0] in workers:
        measured = workers[options.what[0]]()
        if rank() == 0:
            print(json.dumps(measured))
        return None
    count = QUICK_STEPS if options.quick else STEPS
    runs: dict[str, Callable[[], Any]] = {
        "cost": lambda: measure_overhead(0.1 if options.quick else options.minutes, count),
        "processes": lambda: compare_processes(options.quick),
    }
    file = results.result_name("engine", options.quick)
    for name in options.what or runs:
        results.save(file, results.load(file) | {name: runs[name]()})
    return results.publish(file, tables(results.load(file)))


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the tables of overheads, throughputs and memory."""
    found = []
    if cost := content.get("cost"):
        lines = [["steps of the run", str(cost["steps"])]]
        lines += [[f"share of time: {name}", f"{fraction:.2%}"] for name, fraction in cost["part"].items()]
        found.append(results.ResultTable(("ResNet-20, netslim", "measured"), lines))
    if processes := content.get("processes"):
        columns = ("two processes, one thread each", *processes["seconds"])
        rows = [
            [f"{ours} relative to {other}", *(ratio(s, other, ours) for s in processes["seconds"].values())]
            for ours, other in COMPARED
        ]
        title = "Throughput: median of the rounds (quartiles). Above 1: the first is faster"
        found.append(results.ResultTable(columns, rows, title))
        lines = [
            [name, f"{m['weights']:.0f}", f"{m['peak']:.0f}", f"{m['peak'] / m['weights']:.1f}"]
            for name, m in processes["memory"].items()
        ]
        columns = ("AdamW, two processes", "weights, MB", "peak of a process, MB", "times the weights")
        found.append(results.ResultTable(columns, lines, "Memory of fine-tuning, 12 MLP blocks of width 768"))
    return found


def ratio(seconds: dict[str, list[float]], slower: str, faster: str) -> str:
    """Return the median ratio of two variants that were measured in the same rounds, and its quartiles."""
    ratios = [a / b for a, b in zip(seconds[slower], seconds[faster], strict=True)]
    low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
