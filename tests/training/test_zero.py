"""Fine-tuning with DeepSpeed ZeRO, on two gloo processes, gives the network of one process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compress.recipe import EngineConfig, Finetune
from compress.training.parallel import launch
from compress.training.parallel.zero import ZeroState
from helpers.two_processes import SEARCHES, ZERO, prune_small_network, run_in_two_processes, zero_fine_tuning

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


@needs_deepspeed
def test_every_stage_is_as_one_process_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """In single precision, to its rounding: DeepSpeed steps in no other."""
    launched = {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}
    first, second = run_in_two_processes(zero_fine_tuning, tmp_path, **launched)
    assert first == second
    for name, settings in ZERO.items():
        alone = {key: value for key, value in settings.items() if key != "engine"} | {"batch": 32}
        expected = prune_small_network(SEARCHES[-1], dtype=torch.float32, **alone)
        for stage in "123":
            found = first[stage]["runs"][name]
            assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
            for a, b in zip(found["weights"], expected["weights"], strict=True):
                assert a == pytest.approx(b, rel=1e-3, abs=2e-5)
    for stage in "123":
        assert first[stage]["interruptions"] >= 1
        assert first[stage]["runs"]["resumed"] == first[stage]["runs"]["adamw"]


def problems(monkeypatch: pytest.MonkeyPatch, network: nn.Module, **settings: Any) -> str:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr(launch, "world_size", lambda: 2)
    return "\n".join(launch.sharding_problems(network, EngineConfig(**settings), Finetune(epochs=1), own_loop=False))


@needs_deepspeed
def test_settings_that_deepspeed_and_the_recipe_do_not_share_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configuration = {
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "Adam"},
        "scheduler": {"type": "WarmupLR"},
        "bf16": {"enabled": True},
    }
    (tmp_path / "ds.json").write_text(json.dumps(configuration))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    text = problems(monkeypatch, nn.Linear(2, 2).double(), shard_teacher=True)
    assert "zero_stage: expected 1, 2 or 3" in text
    assert (
        "DeepSpeed's configuration: optimizer is not supported, because the recipe's finetune section sets it" in text
    )
    assert "DeepSpeed's configuration: scheduler is not supported" in text
    assert "DeepSpeed's configuration: bf16 is not supported; use engine.precision: bf16" in text
    assert "model: expected weights in float32, which DeepSpeed steps in; got torch.float64" in text
    assert "engine.shard_teacher: DeepSpeed shards only what is trained" in text


def test_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    monkeypatch.setattr(launch, "world_size", lambda: 2)
    found = launch.sharding_problems(nn.Linear(2, 2), EngineConfig(), Finetune(epochs=1), own_loop=False)
    assert "ACCELERATE_USE_MEGATRON_LM: expected plain data parallelism, FSDP or DeepSpeed" in found[0]


def test_optimizer_state_of_other_processes_is_refused() -> None:
    state = ZeroState({})
    with pytest.raises(ValueError, match="DeepSpeed's optimizer state is of 4 processes, and there are 1"):
        state.restore_({"optimizer0/0/exp_avg": torch.zeros(4, 3)}, {})
