"""Coverage of network families: can a network be cut to half of its MACs, and is the cut exact?

    python -m benchmarks.coverage [--quick] [--only resnet18 densenet121] [--skip-peer]

Each network and tool runs in its own process with one thread, because a tool may crash or hang. Ours: a budget of
50 % of the MACs. Torch-Pruning: half of all channels by global magnitude, because it has no MACs budget.
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

from compress.budget import WidthBounds, choose_widths, smallest_fractions
from compress.errors import BudgetError
from compress.graph import Groups, Index
from compress.recipe import Recipe
from compress.search import base as search
from compress.surgery import Plan, find_groups, slice_

from . import results, zoo

RECIPE = Recipe.load({"target": {"channels": True, "residual": True}, "budget": {"macs": "50%"}, "search": {}})
TOLERANCE = 1e-9
QUICK_NETWORKS = ("resnet18", "mobilenet_v2", "densenet121")
LOCATION_SUFFIX = r" \(in [^)]*\)$"  # removed from reasons before counting them
TIMEOUTS = {"ours": 300, "peer": 120}  # seconds by tool; "peer" is Torch-Pruning


def prune_and_verify(name: str, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Prune once; compare the MACs with torch's counter and the outputs with the zeroed network."""
    model, inputs = zoo.build_network(name), zoo.example_inputs(name)
    target, budget = recipe.target, recipe.budget
    start, cpu = time.perf_counter(), time.process_time()
    groups = find_groups(model, inputs, target)
    groups_found = time.perf_counter()
    row: dict[str, Any] = {
        "seconds_find": groups_found - start,
        "smallest": smallest_fractions(groups, budget, target)[budget.unit],
    }
    keep = choose_kept(model, groups, recipe)
    widths_chosen = time.perf_counter()
    plan = Plan.build(model, groups, keep)
    compact = copy.deepcopy(model)
    slice_start = time.perf_counter()
    slice_(compact, plan)
    slice_end, cpu = time.perf_counter(), time.process_time() - cpu
    widths = [len(keep[n]) for n in groups.cost.names]
    row |= {
        "seconds_choose": widths_chosen - groups_found,
        "seconds_slice": slice_end - slice_start,
        "cpu_seconds": cpu,
        "offered": len(groups),
        "refused": dict(Counter(f"{r.kind}: {re.sub(LOCATION_SUFFIX, '', r.reason)}" for r in groups.refused)),
        "notes": groups.notes,
        "dense_macs": int(groups.cost.macs(groups.cost.widths)),
        "macs": int(groups.cost.macs(widths)),
        "dense_params": int(groups.cost.params(groups.cost.widths)),
        "params": int(groups.cost.params(widths)),
        "counted_dense_macs": zoo.count_macs(model, inputs),
        "counted_params": sum(p.numel() for p in compact.parameters()),
    }
    row["macs_left"] = row["macs"] / max(row["dense_macs"], 1)
    untraced = row["counted_dense_macs"] - _count_traced_macs(model, groups)  # outside of all parts
    try:
        with torch.no_grad():
            compact.eval()(inputs)
        row["counted_macs"] = _count_traced_macs(compact, groups) + untraced
        dense_outputs = zoo.compute_outputs(name, copy.deepcopy(model))
        sliced_outputs = zoo.compute_outputs(
            name, plan.apply_(copy.deepcopy(model).double())
        )  # the plan's factors are computed in double too
        zeroed_outputs = zoo.compute_outputs(name, plan.zero_(model))
    except Exception as error:  # a wrong cut can raise any exception
        return row | {
            "status": "does not run",
            "error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
        }
    return row | {
        "status": "ok",
        "difference": zoo.relative_difference(zeroed_outputs, sliced_outputs),
        "effect": zoo.relative_difference(dense_outputs, zeroed_outputs),  # shows that the cut changes outputs
    }


def choose_kept(model: nn.Module, groups: Groups, recipe: Recipe) -> dict[str, Index]:
    """Return the dimensions to keep by magnitude; if the budget is out of reach, those of the minimum widths."""
    target, budget = recipe.target, recipe.budget
    importance = search.data_free_importance(recipe.search, model, groups, recipe.seed)
    try:
        return choose_widths(groups, importance, budget, target, ranking=recipe.search.ranking_for(groups, budget.unit))
    except BudgetError:  # so that a cut is still verified
        least = dict(zip(groups.cost.names, WidthBounds.of(groups, target).least, strict=True))
        return {n: importance[n].argsort(descending=True)[: int(k)].sort().values.numpy() for n, k in least.items()}


def _count_traced_macs(model: nn.Module, groups: Groups) -> int:
    """Count the MACs of the traced parts (the whole network, or the submodules that can be traced)."""
    parts = [part for part in groups.parts if not part.training]
    return sum(zoo.count_macs(model.get_submodule(part.name), *part.args, **part.kwargs) for part in parts)


def run_in_subprocess(name: str, tool: str) -> dict[str, Any]:
    """Run one network and tool in a subprocess; return its row."""
    command = [sys.executable, "-m", "benchmarks.coverage", "--one", name, "--tool", tool]
    start, one_thread = time.perf_counter(), os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        completed = subprocess.run(
            command, cwd=results.ROOT, env=one_thread, capture_output=True, text=True, timeout=TIMEOUTS[tool]
        )
    except subprocess.TimeoutExpired:
        return {"status": "hang", "error": f"not finished after {TIMEOUTS[tool]} s"}
    seconds = {"seconds_process": time.perf_counter() - start}
    try:
        return json.loads(completed.stdout.splitlines()[-1]) | seconds
    except (IndexError, json.JSONDecodeError):
        last_line = (completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"])[-1]
        return {"status": "crash", "error": last_line[:240]} | seconds


def run_worker(name: str, tool: str) -> None:
    """Run one network with one tool in this process; print the row as JSON on the last line."""
    try:
        if tool == "peer":
            from . import torch_pruning_zoo

            row = torch_pruning_zoo.prune_and_verify(name)
        else:
            row = prune_and_verify(name)
    except Exception as error:  # failures are results of this benchmark
        row = {"status": "crash", "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    print(json.dumps(row))


def check_row(row: dict[str, Any]) -> dict[str, bool]:
    """Return which criteria a row meets; a network of which nothing was cut does not count as exact."""
    ok = row["status"] == "ok"
    return {
        "ok": ok,
        "exact": ok and row["macs_left"] < 1 and row["difference"] <= TOLERANCE,
        "half": ok and row["macs_left"] <= 0.5,
        "counted": ok and row.get("macs") == row.get("counted_macs") and row.get("params") == row.get("counted_params"),
    }


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Count how many networks meet each criterion, and list those that fail."""
    verdicts = [check_row(row) for row in rows.values()]
    return {
        "models": len(rows),
        "crash": [n for n, r in rows.items() if r["status"] == "crash"],
        "hang": [n for n, r in rows.items() if r["status"] == "hang"],
        "nothing_cut": [n for n, r in rows.items() if r["status"] == "ok" and r["macs_left"] == 1],
        "not_exact": [n for n, r in rows.items() if r["status"] == "ok" and r["difference"] > TOLERANCE],
        "does_not_run": [n for n, r in rows.items() if r["status"] == "does not run"],
        "exact": sum(v["exact"] for v in verdicts),
        "half_reached": sum(v["half"] for v in verdicts),
        "exact_and_half": sum(v["exact"] and v["half"] for v in verdicts),
    }


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the table of all networks, ours beside Torch-Pruning."""
    lines = []
    for name, row in content["ours"].items():
        rival = content["torch-pruning"].get(name, {"status": ""})
        cells = [name, *_our_cells(row), rival["status"]]
        cells += [_format_number(rival, "macs_left", ".1%"), _format_number(rival, "difference", ".0e")]
        lines.append([*cells, _format_number(rival, "cpu_seconds", ".1f")])
    head = ["model", "groups", "refused", "MACs left", "counted", "difference", "CPU s", "Torch-Pruning"]
    title = "; ".join(summary_line(tool, tool_summary) for tool, tool_summary in content["summary"].items())
    return [results.ResultTable([*head, "MACs left", "difference", "CPU s"], lines, title)]


def _our_cells(row: dict[str, Any]) -> list[str]:
    if "offered" not in row:
        return [f"{row['status']}: {row['error'][:60]}", "", "", "", "", ""]
    checks = check_row(row)
    macs_check = ("equal" if checks["counted"] else "differs") if checks["ok"] else row["status"]
    return [
        str(row["offered"]),
        str(sum(row["refused"].values())),
        f"{row['macs_left']:.1%}",
        macs_check,
        _format_number(row, "difference", ".0e"),
        _format_number(row, "cpu_seconds", ".1f"),
    ]


def _format_number(row: dict[str, Any], key: str, form: str) -> str:
    return format(row[key], form) if key in row else ""


def summary_line(tool: str, counts: dict[str, Any]) -> str:
    """Describe the summary of one tool in one line."""
    total, failures = counts["models"], [len(counts[k]) for k in ("crash", "hang", "does_not_run")]
    return (
        f"{tool}: {failures[0]} crash, {failures[1]} hang, {failures[2]} do not run afterwards; "
        f"exact on {counts['exact']} of {total}; 50 % of MACs reached on {counts['half_reached']} of {total}; "
        f"both on {counts['exact_and_half']}"
    )


def main() -> None:
    parser = results.make_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these networks; results are not saved")
    parser.add_argument("--skip-peer", action="store_true", help="reuse the saved rows of Torch-Pruning")
    parser.add_argument("--one", metavar="NAME", choices=zoo.NAMES, help="run as worker on one network; print JSON")
    parser.add_argument("--tool", choices=tuple(TIMEOUTS), default="ours", help="tool of the worker")
    options = parser.parse_args()
    if options.one:
        return run_worker(options.one, options.tool)
    console, ours, torch_pruning = results.console(), {}, {}
    names = options.only or (QUICK_NETWORKS if options.quick else zoo.NAMES)
    if options.skip_peer:
        stored = results.load("coverage").get("torch-pruning", {})
        torch_pruning = {name: stored[name] for name in names if name in stored}
    for name in track(names, "networks", console=console):
        ours[name] = run_in_subprocess(name, "ours")
        if not options.skip_peer:
            torch_pruning[name] = run_in_subprocess(name, "peer")
        console.print(name, ours[name]["status"], torch_pruning.get(name, {}).get("status", ""))
    summaries = {"ours": summary(ours)} | ({"torch-pruning": summary(torch_pruning)} if torch_pruning else {})
    provenance = {"torch-pruning_from_an_earlier_run": options.skip_peer}
    content = provenance | {"summary": summaries, "ours": ours, "torch-pruning": torch_pruning}
    if options.only:
        return console.print(*tables(content))
    file = results.result_name("coverage", options.quick)
    results.save(file, content)
    return results.publish(file, tables(content))


if __name__ == "__main__":
    main()
