"""Ultralytics' settings: what the user changes, and what a recipe's `finetune` says about a training.

The number of steps always comes from the recipe. Optimizer, lr, momentum, weight_decay, schedule and warmup come from
the recipe if it sets them, else they are Ultralytics' own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from ultralytics.cfg import get_cfg
from ultralytics.utils import DEFAULT_CFG_DICT

from compress.recipe import EngineConfig, Finetune, Recipe

from .quiet import plain_text, quiet

FROM_RECIPE = {
    "epochs": "finetune.epochs",
    "time": "finetune.epochs",
    "seed": "seed",
    "amp": "engine.precision",
    "resume": "resume=True (--resume)",
    "distill_model": "finetune.distill",
    "device": "device",
    "project": "workdir",
    "name": "workdir",
    "save_dir": "workdir",
}
FROM_TASK = ("model", "data", "task", "mode", "pretrained", "cfg", "quantize")
NOT_IN_RESULT = (*FROM_RECIPE, *FROM_TASK, "workers", "cache", "plots", "verbose", "save_period")
OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}


def read_settings(task: str, data: str, overrides: Mapping[str, Any], default_size: int | None = None) -> Any:
    """Return Ultralytics' settings with the user's changes, as a namespace.

    Raises:
        ValueError: there is no such setting, it has another place here, or its value is refused.
    """
    for name in overrides:
        if name in FROM_RECIPE:
            raise ValueError(f"{name}: is set elsewhere here: {FROM_RECIPE[name]}")
        if name in FROM_TASK:
            raise ValueError(f"{name}: follows from the model and the data that were given; leave it out")
    for name in ("imgsz", "batch"):
        if name in overrides and (type(overrides[name]) is not int or overrides[name] < 1):
            raise ValueError(f"{name}: expected a whole number of 1 or more; got {overrides[name]!r}")
    size = {} if default_size is None else {"imgsz": default_size}
    fixed = {"task": task, "data": data, "mode": "train", "plots": False, "verbose": False, "save_period": -1}
    try:
        with quiet():
            return get_cfg(overrides={**size, **overrides, **fixed})
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(
            f"Ultralytics' settings: {plain_text(error)}. See https://docs.ultralytics.com/usage/cfg"
        ) from error


def changed_settings(settings: Any) -> dict[str, Any]:
    """Return the settings that are not Ultralytics' defaults and change the result of a training."""
    values = vars(settings).items()
    return {key: value for key, value in values if key not in NOT_IN_RESULT and DEFAULT_CFG_DICT.get(key) != value}


def parse_settings(options: Sequence[str]) -> dict[str, Any]:
    """Parse settings of the command line.

    >>> parse_settings(["imgsz=320", "mosaic=0.5", "cache=ram", "rect=true"])
    {'imgsz': 320, 'mosaic': 0.5, 'cache': 'ram', 'rect': True}

    Raises:
        ValueError: an option is not KEY=VALUE.
    """
    if invalid := [option for option in options if "=" not in option]:
        raise ValueError(f"--cfg-options {invalid[0]}: expected KEY=VALUE, such as imgsz=320")
    pairs = (option.partition("=") for option in options)
    return {key.strip(): yaml.safe_load(value) for key, _, value in pairs}


def training_settings(
    settings: Any, finetune: Finetune, total: int, per_epoch: int, engine: EngineConfig, seed: int
) -> dict[str, Any]:
    """Return the settings of a training of `total` batches, as overrides of Ultralytics' defaults.

    Args:
        settings: as from `read_settings`.
        per_epoch: batches of an epoch.
    """
    epochs = math.ceil(total / per_epoch)
    fields = finetune.model_fields_set
    values = {**vars(settings), "epochs": epochs, "seed": seed, "patience": 0, "time": None, "resume": False}
    values["amp"] = "bf16" if engine.effective_precision == "bf16" else False
    if "optimizer" in fields:
        values["optimizer"] = OPTIMIZERS[finetune.optimizer]
    for field, name in (("lr", "lr0"), ("momentum", "momentum"), ("weight_decay", "weight_decay")):
        if field in fields:
            values[name] = getattr(finetune, field)
    if "lr" in fields and values["optimizer"] == "auto":
        values["optimizer"] = OPTIMIZERS[finetune.optimizer]  # `auto` would replace the rate
    if "schedule" in fields:
        values |= {"cos_lr": finetune.schedule == "cosine", **({"lrf": 1.0} if finetune.schedule == "constant" else {})}
    if "warmup" in fields:
        values["warmup_epochs"] = finetune.warmup * epochs
    return values


def objections(recipe: Recipe, processes: int) -> list[str]:
    """Return the settings of a recipe that Ultralytics' trainer does not have, one line each."""
    problems = []
    if recipe.export is not None:
        problems.append(
            'export: a pruned YOLO is exported by Ultralytics: compress.yolo.load(workdir).export(format="onnx"); '
            "leave it out"
        )
    if processes > 1:
        problems.append(
            f"task: Ultralytics' trainers and validators run in one process here; got {processes}. Start it without "
            "torchrun"
        )
    finetune, trainer = recipe.finetune, "fine-tuning runs on Ultralytics' trainer"
    if finetune is None:
        return problems
    if recipe.engine.effective_precision == "fp16":
        problems.append("engine.precision: fp16 makes Ultralytics download a network to compare with; use bf16")
    if recipe.engine.batches_per_step > 1:
        problems.append(f"engine.accumulate: {trainer}; give nbs, the nominal batch size, among its settings")
    if finetune.ema is not None:
        problems.append(f"finetune.ema: {trainer}, which always averages the weights; leave it out")
    if finetune.clip is not None:
        problems.append(f"finetune.clip: {trainer}, which clips gradients to a norm of 10; leave it out")
    if finetune.schedule == "step":
        problems.append(f"finetune.schedule: {trainer}; expected cosine or constant, or its own linear one; got step")
    if "decay_norms" in finetune.model_fields_set or finetune.recalibrate:
        problems.append(f"finetune.decay_norms, finetune.recalibrate: {trainer}, which has none; leave them out")
    if finetune.distill is not None and finetune.distill.features:
        problems.append("finetune.distill.features: the outputs of the head are distilled; leave it out")
    return problems
