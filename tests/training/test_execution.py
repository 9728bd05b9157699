"""Memory format, compilation and synchronized batch norms do not change the result."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from compress.progress import ProgressDisplay
from compress.recipe import EngineConfig
from compress.training.engine import Engine
from compress.training.execution import synchronized_batch_norms
from helpers.engine_runs import close, network, pruned


def test_channels_last_is_a_matter_of_memory_only() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    plain, last = pruned("netslim", 16), pruned("netslim", 16, channels_last=True)
    assert plain.plan.keep == last.plan.keep
    assert close(plain.model, last.model)
    assert all(p.is_contiguous() for p in last.model.parameters())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_compiled_fine_tuning_leaves_a_plain_model() -> None:
    plain, compiled = pruned("taylor", 16), pruned("taylor", 16, compile="eager")
    assert close(plain.model, compiled.model)
    assert compiled.model._compiled_call_impl is None


def test_batch_norms_are_synchronized_only_with_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    engine = Engine(torch.device("cpu"), 0, ProgressDisplay(quiet=True), config=EngineConfig(sync_batchnorm=True))
    with synchronized_batch_norms(model, engine):
        assert type(model[1]) is nn.BatchNorm2d
    monkeypatch.setattr("compress.training.execution.world_size", lambda: 2)
    with synchronized_batch_norms(model, engine):
        assert type(model[1]) is nn.SyncBatchNorm
    assert type(model[1]) is nn.BatchNorm2d
    assert "process_group" not in vars(model[1])
