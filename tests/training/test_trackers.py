"""Trackers record the values that the report records."""

from __future__ import annotations

from pathlib import Path

import pytest

import compress
from helpers.engine_runs import SEARCHES, TRAIN, loader, network


def test_what_is_measured_is_tracked(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = {"budget": {"dims": "50%"}, "search": SEARCHES["taylor"], "finetune": TRAIN, "timing": {"repeats": 3}}
    recipe["engine"] = {"track": ["tensorboard"]}
    done = compress.prune(network(), recipe, train=loader(16), val=loader(32), workdir=tmp_path / "out", quiet=True)
    (folder,) = {p.parent for p in (tmp_path / "out" / "track").rglob("*tfevents*") if "17" not in p.parent.name}
    events = EventAccumulator(str(folder))
    events.Reload()
    seen = [(e.step, e.value) for e in events.Scalars("finetune/loss")]
    ours = [(h["step"], h["loss"]) for h in done.report.history if h["stage"] == "finetune" and "loss" in h]
    assert [step for step, _ in seen] == [step for step, _ in ours]
    assert [value for _, value in seen] == pytest.approx([value for _, value in ours], rel=1e-6)
    assert "finetune/val_accuracy" in events.Tags()["scalars"]
