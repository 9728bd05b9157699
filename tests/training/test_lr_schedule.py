"""Learning-rate schedules against their formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compress.recipe import Length, TrainingConfig
from compress.training.lr_schedule import lr_factor


def training(**settings: Any) -> TrainingConfig:
    return TrainingConfig(epochs=Length.model_validate(1), **settings)


def test_schedules_against_the_formulas() -> None:
    cosine = [lr_factor(training(), t, 100) for t in range(100)]
    assert cosine == pytest.approx([(1 + np.cos(np.pi * t / 100)) / 2 for t in range(100)])
    steps = [lr_factor(training(schedule="step", milestones=(0.3, 0.6)), t, 10) for t in range(10)]
    assert steps == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01])
    assert {lr_factor(training(schedule="constant"), t, 10) for t in range(10)} == {1.0}
    warm = [lr_factor(training(schedule="constant", warmup=0.5), t, 10) for t in range(10)]
    assert warm == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1, 1])
