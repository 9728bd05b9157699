"""Updates of the report during a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from compress.graph import Groups, Index
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


def add_note(report: Report, text: str) -> None:
    """Add a note to the report, unless it has the same one."""
    if text not in report.notes:
        report.notes.append(text)
