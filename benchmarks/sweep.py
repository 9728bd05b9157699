"""Sweep over the networks people use: groups, half of the MACs, random plans at independent widths, forward passes.

    python -m benchmarks.sweep [--quick] [--only REGEX] [--rerun] [--plans 25] [--time-limit 300]

Each network runs in its own process with one thread. Each pair of network and target is appended to
results/sweep.jsonl when it is finished, and a sweep that was stopped continues there. A pair is one find_groups, whose
forward passes are counted, one cut to 50 % of the MACs by magnitude, and random plans that keep a random number of
random dimensions in every group. A cut is exact if the zeroed and the sliced network agree in double precision.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from . import results
from .sweep_checks import STATUS_KEYS, TARGETS, check_network
from .sweep_networks import LIBRARIES, NAMES, missing_library

QUICK_NETWORKS = (
    *("timm/vit_tiny_patch16_224", "torchvision/resnet18", "segmentation_models_pytorch/FPN"),
    *("transformers/SwinForImageClassification", "ultralytics/yolo11n"),
)
NOT_PAIRS = ("absent", "not installed")  # statuses of rows that are no pair of network and target
MAX_PASSES, MAX_SECONDS = 10, 30.0  # a pair above is listed as slow
Row = dict[str, Any]


def _is_finished(rows: Sequence[Row]) -> bool:
    """Return whether all targets have a row, or the default target failed."""
    failed = any(row["target"] == "default" and row["status"] in ("not installed", "crash", "hang") for row in rows)
    return failed or {row["target"] for row in rows} == set(TARGETS)


def run_network(name: str, known: Sequence[Row], plans: int, time_limit: float) -> Iterator[Row]:
    """Yield the rows of a network's targets that are not known, from worker processes.

    If a target takes longer than the time limit or crashes the process, a new process continues with the next one;
    if that is the default target, the network is finished.
    """
    if library := missing_library(name):
        yield {"target": "default", "status": "not installed", "reason": f"{library} is not installed"}
        return
    finished = {row["target"]: row for row in known}
    while not _is_finished(list(finished.values())):
        with closing(_run_worker(name, finished, plans, time_limit)) as rows:
            for row in rows:
                finished[row["target"]] = row
                yield row
                if _is_finished(list(finished.values())):
                    break


def _run_worker(name: str, finished: dict[str, Row], plans: int, time_limit: float) -> Generator[Row, None, None]:
    """Yield rows from one process, the last one with status crash or hang if it does not finish all targets."""
    command = [sys.executable, "-m", "benchmarks.sweep", "--one", name, "--plans", str(plans)]
    command += ["--finished", *finished]
    if kinds := finished.get("default", {}).get("kinds"):
        command += ["--kinds", *kinds]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "YOLO_VERBOSE": "False"}
    lines: queue.Queue[str | None] = queue.Queue()
    left = [target for target in TARGETS if target not in finished]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        worker = subprocess.Popen(
            command, cwd=results.ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        reader = threading.Thread(target=_read_lines, args=(worker, lines), daemon=True)
        reader.start()
        try:
            while left:
                line = lines.get(timeout=time_limit)
                if line is None:
                    errors.seek(0)
                    last_line = (errors.read().strip().splitlines() or [f"exit code {worker.wait()}"])[-1]
                    yield {"target": left[0], "status": "crash", "reason": last_line[:240]}
                    return
                if line.startswith('{"target"'):  # libraries may print other lines
                    left.pop(0)
                    yield json.loads(line)
        except queue.Empty:
            yield {"target": left[0], "status": "hang", "reason": f"not finished after {time_limit:g} s"}
        finally:
            worker.kill()
            worker.wait()
            reader.join()


def _read_lines(worker: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    """Put the lines that a worker prints into a queue, then None."""
    assert worker.stdout is not None
    with worker.stdout:
        for line in worker.stdout:
            lines.put(line)
    lines.put(None)


def read_rows(path: Path) -> list[Row]:
    """Read the rows of earlier runs; the last row of a pair counts, and a line that was cut off is ignored."""
    rows: dict[tuple[str, str], Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # the run was killed while it wrote
            continue
        rows[row["network"], row["target"]] = row
    return list(rows.values())


def append_row(path: Path, row: Row) -> None:
    """Append a row as one line."""
    path.parent.mkdir(exist_ok=True)
    torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * bool(torn) + json.dumps(row) + "\n")


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Count pairs, plans and their outcomes, networks at half of the MACs, and the most forward passes."""
    pairs = [row for row in rows if row["status"] not in NOT_PAIRS]
    networks = {row["network"] for row in pairs}
    half = [row for row in pairs if row["status"] == "exact" and row["macs_left"] <= 0.5]
    return {
        "networks": len(networks),
        "pairs": len(pairs),
        "plans": sum(row.get("plans", 0) for row in pairs),
        **{key: sum(row.get(key, 0) for row in pairs) for key in STATUS_KEYS},
        "crash_or_hang": sum(row["status"] in ("crash", "hang") for row in pairs),
        "half_by_default": sum(row["target"] == "default" for row in half),
        "half_by_any_target": len({row["network"] for row in half}),
        "most_passes": max((row.get("forward_passes", 0) for row in pairs), default=0),
        "most_seconds": max((row.get("seconds_find", 0) for row in pairs), default=0),
    }


def describe_failure(row: Row) -> str:
    """Return what is wrong with a pair: failing cuts, too many forward passes, slowness; empty if nothing is."""
    if row["status"] in NOT_PAIRS:
        return ""
    problems = []
    if row["status"] in ("crash", "hang"):
        problems.append(f"{row['status']}: {row['reason'][:160]}")
    if row["status"] in ("does not run", "differs"):
        problems.append(f"half of the MACs: {row['status']}")
    failing = [key for key in STATUS_KEYS if key not in ("exact", "refused_plans") and row.get(key)]
    problems += [f"{row[key]} of {row['plans']} plans: {STATUS_KEYS[key]}" for key in failing]
    if row.get("forward_passes", 0) > MAX_PASSES:
        problems.append(f"{row['forward_passes']} forward passes")
    if row.get("seconds_find", 0) > MAX_SECONDS:
        problems.append(f"find_groups takes {row['seconds_find']:.0f} s")
    return "; ".join(problems)


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the counts by library, the pairs with failures, networks above half of the MACs, and all pairs."""
    rows = content["rows"]
    head = ["library", "networks", "pairs", "plans", "exact", "refused", "do not run", "differ", "crash or hang"]
    head += ["50 % MACs, default target", "50 % MACs, any target", "most forward passes", "slowest find_groups"]
    lines = []
    for library in [*LIBRARIES, ""]:
        counts = summary([row for row in rows if row["network"].startswith(library)])
        if counts["pairs"]:
            label = library and f"{library} {content['versions'].get(library, '')}".strip()
            cells = [str(value) for value in counts.values()]
            lines.append([label or "all", *cells[:-1], f"{cells[-1]} s"])
    failures = [[row["network"], row["target"], text, _cause(row)] for row in rows if (text := describe_failure(row))]
    smallest: dict[str, Row] = {}  # the row with the fewest MACs left, by network
    for row in (row for row in rows if row["status"] not in NOT_PAIRS):
        smallest[row["network"]] = min(smallest.get(row["network"], row), row, key=_macs_left)
    above = [
        [name, row["target"], f"{_macs_left(row):.1%}", row.get("reason", "")]
        for name, row in smallest.items()
        if _macs_left(row) > 0.5
    ]
    return [
        results.ResultTable(head, lines, "Counts by library."),
        results.ResultTable(
            ["network", "target", "failure", "cause"], failures, f"Pairs that fail, or need over {MAX_PASSES} passes."
        ),
        results.ResultTable(
            ["network", "best target", "MACs left", "most common refusal"], above, "Networks above 50 % of the MACs."
        ),
        results.ResultTable(ALL_PAIRS_HEAD, [_pair_cells(row) for row in rows if row["status"] != "absent"]),
    ]


def _macs_left(row: Row) -> float:
    return row.get("macs_left", 1.0)


ALL_PAIRS_HEAD = ["network", "target", "groups", "refused", "MACs left", "half", "plans", "exact", "passes", "find s"]


def _pair_cells(row: Row) -> list[str]:
    macs = f"{row['macs_left']:.1%}" if "macs_left" in row else ""
    values = [row.get(key, "") for key in ("plans", "exact", "forward_passes", "seconds_find")]
    sizes = [row.get(key, "") for key in ("groups", "refused")]
    return [row["network"], row["target"], *map(str, sizes), macs, row["status"], *map(str, values)]


def _cause(row: Row) -> str:
    """Return the first failure of a row with the groups that suffice for it."""
    if not row.get("failures"):
        return row.get("reason", "") if "forward_passes" in row else ""
    first = next((f for f in row["failures"] if "groups" in f), row["failures"][0])
    groups = ", ".join(f"{name} {width}" for name, width in first.get("groups", {}).items())
    return f"{first['detail'][:120]}{f' ({groups})' if groups else ''}"


def summary_line(rows: Sequence[Row]) -> str:
    """Describe the summary in one line."""
    counts = summary(rows)
    return (
        f"{counts['pairs']} pairs of {counts['networks']} networks, {counts['plans']} plans: {counts['exact']} exact, "
        f"{counts['refused_plans']} refused by verification, {counts['does_not_run']} do not run, "
        f"{counts['differs']} differ; {counts['crash_or_hang']} crash or hang; "
        f"50 % of the MACs on {counts['half_by_default']} networks by default, {counts['half_by_any_target']} by any "
        f"target; at most {counts['most_passes']} forward passes and {counts['most_seconds']} s for find_groups"
    )


def run_sweep(names: Sequence[str], path: Path, options: Any, console: Console) -> None:
    """Run all pairs that are not finished, append their rows, and print progress with the time left."""
    rows = [] if options.rerun else read_rows(path)
    known = {name: [row for row in rows if row["network"] == name] for name in names}
    waiting = [name for name in names if not _is_finished(known[name])]
    start, revision = time.perf_counter(), results.environment()["revision"]
    for number, name in enumerate(waiting):
        for row in run_network(name, known[name], options.plans, options.time_limit):
            row = {"network": name} | row | {"revision": revision}
            append_row(path, row)
            if row["status"] != "absent":
                failure = describe_failure(row)
                console.print(f"  {name}, {row['target']}: {row['status']}{f'; {failure}' if failure else ''}")
        minutes = (time.perf_counter() - start) / (number + 1) * (len(waiting) - number - 1) / 60
        console.print(f"{number + 1} of {len(waiting)} networks, about {minutes:.0f} min left")


def main() -> None:
    parser = results.make_parser(__doc__)
    parser.add_argument("--only", metavar="REGEX", help="run only networks whose name contains a match; writes no page")
    parser.add_argument("--rerun", action="store_true", help="run finished pairs again; their last rows count")
    parser.add_argument("--plans", type=int, default=25, help="random plans for each pair (default: 25)")
    parser.add_argument("--time-limit", type=float, default=300, metavar="S", help="seconds per pair (default: 300)")
    parser.add_argument("--one", metavar="NAME", choices=NAMES, help="run as worker on one network; print JSON lines")
    parser.add_argument("--finished", nargs="*", default=[], metavar="TARGET", help="targets that the worker skips")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="kinds of dimensions that the network has")
    options = parser.parse_args()
    if options.one:
        kinds = set(options.kinds) if options.kinds else None
        for row in check_network(options.one, options.plans, set(options.finished), kinds):
            print(json.dumps(row), flush=True)
        return
    if options.quick:
        options.plans = min(options.plans, 3)
    names = [n for n in (QUICK_NETWORKS if options.quick else NAMES) if re.search(options.only or "", n)]
    file, console = results.result_name("sweep", options.quick), results.console()
    path = results.FOLDER / f"{file}.jsonl"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a worker ends with the sweep
    run_sweep(names, path, options, console)
    order = {name: i for i, name in enumerate(NAMES)}
    rows = sorted((row for row in read_rows(path) if row["network"] in names), key=lambda row: order[row["network"]])
    console.print(summary_line(rows))
    if options.only:
        return
    versions = {library: metadata.version(library) for library in LIBRARIES if not missing_library(f"{library}/")}
    content = {"settings": {"plans": options.plans}, "versions": versions, "summary": summary(rows), "rows": rows}
    results.save(file, content)
    results.publish(file, tables(content))


if __name__ == "__main__":
    main()
