"""Fine-tuning sharded by FSDP2, on two gloo processes, gives the network of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import compress
from compress.recipe import EngineConfig, Finetune
from compress.training.parallel import launch
from helpers.two_processes import SEARCHES, SHARDED, prune_small_network, run_in_two_processes, sharded_fine_tuning

FSDP = {  # as `accelerate launch --use_fsdp --fsdp_version 2` sets them
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
    "FSDP_MIN_NUM_PARAMS": "200",
}


def check_same_network(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["keep"] == theirs["keep"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-8)
    assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-8)
    for a, b in zip(ours["weights"], theirs["weights"], strict=True):
        assert a == pytest.approx(b, rel=1e-7, abs=1e-9)


def test_sharded_fine_tuning_is_that_of_one_process_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    first, second = run_in_two_processes(sharded_fine_tuning, tmp_path, **FSDP)
    sizes = [first.pop("sizes"), second.pop("sizes")]
    assert first == second
    assert all(0.4 < own < 0.6 and left_in_the_network == 0 for own, left_in_the_network in sizes)
    for name, settings in SHARDED.items():
        alone = {key: value for key, value in settings.items() if key != "engine"} | {"batch": 32}
        check_same_network(first["runs"][name], prune_small_network(SEARCHES[-1], **alone))
    assert first["interruptions"] >= 1
    assert first["runs"]["resumed"] == first["runs"]["adamw"]


def problems(monkeypatch: pytest.MonkeyPatch, engine: EngineConfig, finetune: Finetune | None, **variables: str) -> str:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "world_size", lambda: 2)
    return "\n".join(launch.sharding_problems(nn.Linear(2, 2), engine, finetune, own_loop=False))


def test_all_that_cannot_be_sharded_is_listed_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineConfig(compile=True, precision="fp16", shard_teacher=True)
    finetune = Finetune.model_validate({"epochs": 1, "ema": 0.9, "distill": {"features": ["0"]}})
    text = problems(monkeypatch, engine, finetune, **FSDP)
    assert "finetune.ema: needs the whole network in each process" in text
    assert "engine.compile: is not supported together with ACCELERATE_USE_FSDP" in text
    assert "engine.precision: expected float32 or bf16 together with ACCELERATE_USE_FSDP; got fp16" in text
    assert "engine.shard_teacher: finetune.distill.features needs the whole teacher" in text
    assert problems(monkeypatch, EngineConfig(), Finetune(epochs=1)) == ""


def test_sharding_that_fits_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the recipe has no finetune section" in problems(monkeypatch, EngineConfig(), None, **FSDP)
    finetune = Finetune(epochs=1)
    assert "fine-tunes in its own loop" in launch.sharding_problems(nn.Linear(2, 2), EngineConfig(), finetune, True)[0]
    assert "fsdp_version: expected 2; the launcher asks for 1" in problems(
        monkeypatch, EngineConfig(), finetune, FSDP_VERSION="1", FSDP_MIN_NUM_PARAMS="200"
    )
    policy = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Absent"}
    assert "Could not find the transformer layer class Absent" in problems(
        monkeypatch, EngineConfig(), finetune, **{**FSDP, **policy}
    )


def test_a_sharded_teacher_needs_sharded_fine_tuning() -> None:
    recipe = {"budget": {"dims": "50%"}, "search": SEARCHES[-1], "engine": {"shard_teacher": True}}
    with pytest.raises(compress.NotReady, match=r"engine\.shard_teacher: needs several processes and FSDP"):
        prune_small_network(batch=16, **recipe)
