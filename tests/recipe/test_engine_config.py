"""Settings of the engine: what the recipe leaves open comes from the launcher."""

from __future__ import annotations

import pytest

from compress.recipe import EngineConfig


def test_launchers_set_what_the_recipe_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (EngineConfig().effective_precision, EngineConfig().batches_per_step) == ("float32", 1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert (EngineConfig().effective_precision, EngineConfig().batches_per_step) == ("bf16", 4)
    assert EngineConfig(precision="float32", accumulate=2).effective_precision == "float32"
    assert EngineConfig(precision="float32", accumulate=2).batches_per_step == 2
