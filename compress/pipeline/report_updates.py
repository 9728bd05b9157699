"""Updates of the report during a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from compress.budget import compare_latency_in_batches, describe_use, remaining_fractions
from compress.graph import Groups, Index, weights_file_bytes
from compress.recipe import Budget, Timing
from compress.report import Report


def record_choice(
    report: Report | None,
    groups: Groups,
    importance: Mapping[str, Tensor],
    keep: Mapping[str, Index],
    notes: Sequence[str],
) -> Report:
    """Return the report with the widths of a round; the first round starts it."""
    current = Report.of(groups, keep)
    if report is None:
        report = current
    elif not report.groups:  # a report of operations alone
        report.groups, report.refused = current.groups, current.refused
        report.notes += [note for note in current.notes if note not in report.notes]
    rows = {row.name: row for row in report.groups}
    for name, kept in keep.items():
        if name in rows:
            rows[name].kept = len(kept)
    report.pruned.params, report.pruned.macs = current.pruned.params, current.pruned.macs
    report.importance |= {name: np.asarray(values, dtype=float).tolist() for name, values in importance.items()}
    report.notes = [note for note in report.notes if not note.startswith("latency ")]  # measured in an earlier round
    for note in notes:
        add_note(report, note)
    return report


def record_costs(
    report: Report, dense: nn.Module, compact: nn.Module, example_inputs: Any, timing: Timing
) -> int | str:
    """Time both networks and add latencies, the size of the files and the number of parameters to the report.

    Returns:
        The batch size that was timed.
    """
    times, batch_size = compare_latency_in_batches([dense, compact], example_inputs, timing)
    for network, latency in zip((report.dense, report.pruned), times, strict=True):
        network.latency_ms, network.latency_spread_ms = latency.median, latency.spread
    # Counted again, because compensation adds biases.
    report.pruned.params = sum(p.numel() for p in compact.parameters())
    report.dense.size_bytes, report.pruned.size_bytes = map(weights_file_bytes, (dense, compact))
    return batch_size


def note_tight_limit(report: Report, budget: Budget, dense_costs: Mapping[str, float]) -> None:
    """Note which limit of a budget of several is the tight one, and what is left by each."""
    if len(budget.limits) < 2:
        return
    dense, pruned = report.dense, report.pruned
    pairs: dict[str, tuple[float | None, float | None]] = {
        "macs": (pruned.macs, dense.macs),
        "params": (pruned.params, dense.params),
        "dims": (sum(row.kept for row in report.groups), sum(row.width for row in report.groups)),
        "size": (pruned.size_bytes, dense.size_bytes),
        "latency": (pruned.latency_ms, dense.latency_ms),
    }
    used = {unit: left / whole for unit, (left, whole) in pairs.items() if left and whole and unit in budget.limits}
    add_note(report, describe_use(used, remaining_fractions(budget, dense_costs), budget))


def add_note(report: Report, text: str) -> None:
    """Add a note to the report, unless it has the same one."""
    if text not in report.notes:
        report.notes.append(text)
