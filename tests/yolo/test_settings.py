"""Ultralytics' settings: the user's changes, and a recipe's `finetune` in their names."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("ultralytics", reason="the extra yolo is not installed")
from ultralytics.utils import LOGGER

from compress.recipe import EngineConfig, Recipe
from compress.yolo.settings import changed_settings, objections, parse_settings, read_settings, training_settings


def settings_of(finetune: dict[str, Any], total: int = 25, **overrides: Any) -> dict[str, Any]:
    config = Recipe.load({"budget": "50%", "finetune": finetune}).finetune
    assert config is not None
    settings = read_settings("detect", "data.yaml", overrides)
    return training_settings(settings, config, total, 10, EngineConfig(), 3)


def test_length_and_seed_come_from_the_run_and_everything_else_is_ultralytics_own() -> None:
    values = settings_of({}, mosaic=0.5, batch=4)
    default = vars(read_settings("detect", "data.yaml", {}))
    assert (values["epochs"], values["seed"], values["mosaic"], values["batch"]) == (3, 3, 0.5, 4)
    for name in ("optimizer", "lr0", "lrf", "momentum", "weight_decay", "warmup_epochs", "cos_lr", "close_mosaic"):
        assert values[name] == default[name]


def test_settings_that_change_a_training_are_told_apart_from_those_that_do_not() -> None:
    settings = read_settings("detect", "data.yaml", {"imgsz": 320, "workers": 0, "cache": "ram", "mosaic": 0.5})
    assert changed_settings(settings) == {"imgsz": 320, "mosaic": 0.5}
    assert changed_settings(read_settings("detect", "elsewhere.yaml", {})) == {}


def test_fields_of_the_recipe_take_the_place_of_settings() -> None:
    values = settings_of({"optimizer": "adamw", "lr": 1e-3, "momentum": 0.8, "weight_decay": 0.1, "warmup": 0.5})
    names = ("optimizer", "lr0", "momentum", "weight_decay", "warmup_epochs")
    assert [values[name] for name in names] == ["AdamW", 1e-3, 0.8, 0.1, 1.5]
    assert settings_of({"schedule": "cosine"})["cos_lr"] is True
    assert settings_of({"schedule": "constant"})["lrf"] == 1.0
    assert settings_of({"lr": 1e-3})["optimizer"] == "SGD"  # the rate would not be used by `auto`


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"epochs": 3}, r"epochs: is set elsewhere here: finetune\.epochs"),
        ({"amp": True}, r"amp: is set elsewhere here: engine\.precision"),
        ({"model": "x"}, r"model: follows from the model and the data"),
        ({"imgzs": 64}, r"Ultralytics' settings: .*imgzs.*See https://docs\.ultralytics\.com"),
        ({"mosaic": "much"}, r"Ultralytics' settings: .*mosaic"),
        ({"imgsz": "big"}, r"imgsz: expected a whole number of 1 or more; got 'big'"),
        ({"imgsz": [64, 96]}, r"imgsz: expected a whole number of 1 or more; got \[64, 96\]"),
        ({"batch": -1}, r"batch: expected a whole number of 1 or more; got -1"),
        ({"batch": 0.5}, r"batch: expected a whole number of 1 or more; got 0\.5"),
    ],
)
def test_settings_that_do_not_exist_or_have_another_place_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_settings("detect", "data.yaml", overrides)


def test_setting_that_does_not_exist_prints_no_help_of_another_program() -> None:
    printed, level = Mock(spec=logging.Handler, level=logging.INFO), LOGGER.level
    LOGGER.addHandler(printed)
    LOGGER.setLevel(logging.INFO)
    with pytest.raises(ValueError, match="imgzs"):
        read_settings("detect", "data.yaml", {"imgzs": 64})
    LOGGER.setLevel(level)
    LOGGER.removeHandler(printed)
    assert not printed.handle.called


def test_options_of_the_command_line_are_values_of_yaml() -> None:
    assert parse_settings(["imgsz=320", "cache=ram"]) == {"imgsz": 320, "cache": "ram"}
    with pytest.raises(ValueError, match=r"--cfg-options imgsz: expected KEY=VALUE, such as imgsz=320"):
        parse_settings(["imgsz"])


def test_several_processes_are_refused() -> None:
    recipe = Recipe.load({"budget": "50%", "finetune": {}, "engine": {"accumulate": 2}})
    problems = " ".join(objections(recipe, processes=2))
    assert "run in one process here; got 2. Start it without torchrun" in problems
    assert "engine.accumulate: fine-tuning runs on Ultralytics' trainer; give nbs" in problems
