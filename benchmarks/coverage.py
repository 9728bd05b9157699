"""Which families of networks can be cut to half of their multiply-adds, and is the cut exact?

    python -m benchmarks.coverage [--quick] [--only resnet18 densenet121] [--skip-peer]

Each network and tool runs in a process of its own with one thread, since a tool may crash or never return.
Ours: budget macs 50 %. Torch-Pruning: half of all channels by global magnitude; it has no budget in multiply-adds.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import torch
from rich.progress import track
from torch import nn

from compress import search
from compress.budget import Bounds, BudgetError, choose, smallest
from compress.discover import find_groups
from compress.groups import Groups
from compress.plan import Plan
from compress.recipe import Recipe
from compress.slicing import slice_

from . import results, zoo

RECIPE = Recipe.load({"target": {"channels": True, "residual": True}, "budget": {"macs": "50%"}, "search": {}})
EXACT = 1e-9
QUICK = ("resnet18", "mobilenet_v2", "densenet121")
PLACE = r" \(in [^)]*\)$"  # reasons are counted over all places
SECONDS = {"ours": 300, "peer": 120}


def run(name: str, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Cut once and compare: multiply-adds with torch's counter, the function with the zeroed network."""
    model, inputs = zoo.build(name), zoo.example(name)
    target, budget = recipe.target, recipe.budget
    start, cpu = time.perf_counter(), time.process_time()
    groups = find_groups(model, inputs, target)
    found = time.perf_counter()
    row: dict[str, Any] = {"seconds_find": found - start, "smallest": smallest(groups, budget, target)}
    importance = search.importance(recipe.search, model, groups, recipe.seed)
    try:
        keep = choose(groups, importance, budget, target, ranking=recipe.search.ranks_by(groups, budget.unit))
    except BudgetError:  # as far as it goes, so that the cut is checked all the same
        least = dict(zip(groups.cost.names, Bounds.of(groups, target).least, strict=True))
        keep = {n: importance[n].argsort(descending=True)[: int(k)].sort().values.numpy() for n, k in least.items()}
    chosen = time.perf_counter()
    plan = Plan.build(model, groups, keep)
    compact = copy.deepcopy(model)
    ready = time.perf_counter()
    slice_(compact, plan)
    sliced, cpu = time.perf_counter(), time.process_time() - cpu
    kept = [len(keep[n]) for n in groups.cost.names]
    row |= {
        "seconds_choose": chosen - found,
        "seconds_slice": sliced - ready,
        "cpu_seconds": cpu,
        "offered": len(groups),
        "refused": dict(Counter(f"{r.kind}: {re.sub(PLACE, '', r.reason)}" for r in groups.refused)),
        "notes": groups.notes,
        "dense_macs": int(groups.cost.macs(groups.cost.widths)),
        "macs": int(groups.cost.macs(kept)),
        "dense_params": int(groups.cost.params(groups.cost.widths)),
        "params": int(groups.cost.params(kept)),
        "counted_dense_macs": zoo.count_macs(model, inputs),
        "counted_params": sum(p.numel() for p in compact.parameters()),
    }
    row["macs_left"] = row["macs"] / max(row["dense_macs"], 1)
    untraced = row["counted_dense_macs"] - _counted(model, groups)  # what no part holds depends on the proposals
    try:
        with torch.no_grad():
            compact.eval()(inputs)
        row["counted_macs"] = _counted(compact, groups) + untraced
        dense = zoo.outputs(name, copy.deepcopy(model))
        got = zoo.outputs(name, plan.apply_(copy.deepcopy(model).double()))  # factors of the plan in double, too
        expected = zoo.outputs(name, plan.zero_(model))
    except Exception as error:  # a network that was cut wrongly can stop anywhere
        return row | {
            "status": "does not run",
            "error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
        }
    return row | {
        "status": "ok",
        "difference": zoo.difference(expected, got),
        "effect": zoo.difference(dense, expected),  # what zeroing does to the outputs: the cut is not of dead weights
    }


def _counted(model: nn.Module, groups: Groups) -> int:
    """Multiply-adds of what was traced: the network as it is used, or those parts of it that can be traced."""
    parts = [part for part in groups.parts if not part.training]
    return sum(zoo.count_macs(model.get_submodule(part.name), *part.args, **part.kwargs) for part in parts)


def apart(name: str, tool: str) -> dict[str, Any]:
    """Run one network in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.coverage", "--one", name, "--tool", tool]
    start, one_thread = time.perf_counter(), os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=results.ROOT, env=one_thread, capture_output=True, text=True, timeout=SECONDS[tool]
        )
    except subprocess.TimeoutExpired:
        return {"status": "hang", "error": f"not done after {SECONDS[tool]} s"}
    seconds = {"seconds_process": time.perf_counter() - start}
    try:
        return json.loads(done.stdout.splitlines()[-1]) | seconds
    except (IndexError, json.JSONDecodeError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"status": "crash", "error": last[:240]} | seconds


def one(name: str, tool: str) -> None:
    """Worker: one network, one tool, the result as JSON on the last line."""
    try:
        if tool == "peer":
            from . import peer

            row = peer.run(name)
        else:
            row = run(name)
    except Exception as error:  # this is what the benchmark is about
        row = {"status": "crash", "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    print(json.dumps(row))


def verdict(row: dict[str, Any]) -> dict[str, bool]:
    """What is true of a cut; where nothing was cut, nothing was shown to be exact."""
    ran = row["status"] == "ok"
    return {
        "ok": ran,
        "exact": ran and row["macs_left"] < 1 and row["difference"] <= EXACT,
        "half": ran and row["macs_left"] <= 0.5,
        "counted": ran
        and row.get("macs") == row.get("counted_macs")
        and row.get("params") == row.get("counted_params"),
    }


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    verdicts = [verdict(row) for row in rows.values()]
    return {
        "models": len(rows),
        "crash": [n for n, r in rows.items() if r["status"] == "crash"],
        "hang": [n for n, r in rows.items() if r["status"] == "hang"],
        "nothing_cut": [n for n, r in rows.items() if r["status"] == "ok" and r["macs_left"] == 1],
        "not_exact": [n for n, r in rows.items() if r["status"] == "ok" and r["difference"] > EXACT],
        "does_not_run": [n for n, r in rows.items() if r["status"] == "does not run"],
        "exact": sum(v["exact"] for v in verdicts),
        "half_reached": sum(v["half"] for v in verdicts),
        "exact_and_half": sum(v["exact"] and v["half"] for v in verdicts),
    }


def sheets(content: dict[str, Any]) -> list[results.Sheet]:
    lines = []
    for name, row in content["ours"].items():
        other = content["torch-pruning"].get(name, {"status": ""})
        cells = [name, *_cells(row), other["status"]]
        cells += [_number(other, "macs_left", ".1%"), _number(other, "difference", ".0e")]
        lines.append([*cells, _number(other, "cpu_seconds", ".1f")])
    head = ["model", "groups", "refused", "MACs left", "counted", "difference", "CPU s", "Torch-Pruning"]
    found = "; ".join(line(tool, part) for tool, part in content["summary"].items())
    return [results.Sheet([*head, "MACs left", "difference", "CPU s"], lines, found)]


def _cells(row: dict[str, Any]) -> list[str]:
    if "offered" not in row:
        return [f"{row['status']}: {row['error'][:60]}", "", "", "", "", ""]
    good = verdict(row)
    equal = ("equal" if good["counted"] else "differs") if good["ok"] else row["status"]
    return [
        str(row["offered"]),
        str(sum(row["refused"].values())),
        f"{row['macs_left']:.1%}",
        equal,
        _number(row, "difference", ".0e"),
        _number(row, "cpu_seconds", ".1f"),
    ]


def _number(row: dict[str, Any], key: str, form: str) -> str:
    return format(row[key], form) if key in row else ""


def line(tool: str, found: dict[str, Any]) -> str:
    count, broken = found["models"], [len(found[k]) for k in ("crash", "hang", "does_not_run")]
    return (
        f"{tool}: {broken[0]} crash, {broken[1]} hang, {broken[2]} do not run afterwards; exact on {found['exact']} of "
        f"{count}; 50 % of MACs reached on {found['half_reached']} of {count}; both on {found['exact_and_half']}"
    )


def main() -> None:
    parser = results.options_of(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these networks; the result is not stored")
    parser.add_argument("--skip-peer", action="store_true", help="keep the stored rows of Torch-Pruning")
    parser.add_argument("--one", metavar="NAME", choices=zoo.NAMES, help="worker: one network, JSON on the last line")
    parser.add_argument("--tool", choices=tuple(SECONDS), default="ours")
    options = parser.parse_args()
    if options.one:
        return one(options.one, options.tool)
    console, ours, peer = results.console(), {}, {}
    names = options.only or (QUICK if options.quick else zoo.NAMES)
    if options.skip_peer:
        stored = results.load("coverage").get("torch-pruning", {})
        peer = {name: stored[name] for name in names if name in stored}
    for name in track(names, "networks", console=console):
        ours[name] = apart(name, "ours")
        if not options.skip_peer:
            peer[name] = apart(name, "peer")
        console.print(name, ours[name]["status"], peer.get(name, {}).get("status", ""))
    found = {"ours": summary(ours)} | ({"torch-pruning": summary(peer)} if peer else {})
    kept = {"torch-pruning_from_an_earlier_run": options.skip_peer}
    content = kept | {"summary": found, "ours": ours, "torch-pruning": peer}
    if options.only:
        return console.print(*sheets(content))
    file = results.named("coverage", options.quick)
    results.save(file, content)
    return results.show(file, sheets(content))


if __name__ == "__main__":
    main()
