"""Recalibration sets batch norm statistics to those of the batches."""

from __future__ import annotations

import copy

import torch

import compress
from compress.progress import ProgressDisplay
from compress.training.engine import Engine
from compress.training.recalibrate import recalibrate_
from helpers.digits import dense, loaders


def test_recalibration_gives_the_statistics_of_the_batches() -> None:
    """The first norm's input does not depend on other norms: its statistics are plain means."""
    model = dense()
    train = [(x, y) for x, y in loaders(count=256)[0]]
    task = compress.Classification(train)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        inputs = [model.stem[0](x) for x, _ in train[:3]]
    recalibrate_(model, task, train, 3, Engine(torch.device("cpu"), 0, ProgressDisplay(quiet=True)))
    norm = model.stem[1]
    assert torch.allclose(norm.running_mean, torch.stack([i.mean((0, 2, 3)) for i in inputs]).mean(0), atol=1e-6)
    assert torch.allclose(norm.running_var, torch.stack([i.var((0, 2, 3)) for i in inputs]).mean(0), atol=1e-5)
    assert norm.momentum == 0.1
    assert not any(m.training for m in model.modules())
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before if "running" not in k and "tracked" not in k)
