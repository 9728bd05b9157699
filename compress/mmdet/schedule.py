"""The config of a fine-tuning: that of the detector, with what the recipe's `finetune` says put in its place.

That is always the length, to which the config's schedule is stretched; of optimizer, lr, momentum, weight_decay, clip,
schedule, warmup and milestones it is what the recipe gives. What it leaves out is the config's.
"""

from __future__ import annotations

import copy
from typing import Any

from mmengine.config import Config

from ..compute import EngineConfig
from ..recipe import Finetune

MARKS = ("begin", "end", "T_max", "milestones")  # of a scheduler, in epochs or iterations


def settings(cfg: Config, config: Finetune, total: int, per_epoch: int, engine: EngineConfig | None = None) -> Config:
    """The config for `total` steps; in epochs where both the config and the recipe count whole ones."""
    engine = engine or EngineConfig()
    cfg, given = copy.deepcopy(cfg), config.model_fields_set
    before = cfg.get("train_cfg") or {}
    was = before.get("max_iters") or before.get("max_epochs", 0) * per_epoch or total
    every = before.get("val_interval", 1)
    whole = config.epochs.unit == "epochs" and config.epochs.count == int(config.epochs.count)
    hooks = cfg.get("default_hooks") or {}
    saves = {"type": "CheckpointHook", "interval": 1, "max_keep_ckpts": 1, **(hooks.get("checkpoint") or {})}
    if whole and "max_iters" not in before:
        cfg.train_cfg = {"type": "EpochBasedTrainLoop", "max_epochs": int(config.epochs.count), "val_interval": every}
    else:
        whole = False
        every = min(total, every * (1 if "max_iters" in before else per_epoch))
        cfg.train_cfg = {"type": "IterBasedTrainLoop", "max_iters": total, "val_interval": every}
        saves |= {"by_epoch": False, "interval": min(total, per_epoch)}
        cfg.log_processor = {**cfg.get("log_processor", {}), "by_epoch": False}
    cfg.default_hooks = {**hooks, "checkpoint": saves}
    if given & {"schedule", "warmup", "milestones"}:
        cfg.param_scheduler = _schedule(config, total)
    else:
        cfg.param_scheduler = _stretched(cfg.get("param_scheduler"), total / was, per_epoch, whole)
    _optimise_(cfg, config, set(given))
    wrapper = cfg.get("optim_wrapper") or {}
    if engine.passes != "float32" and wrapper.get("type", "OptimWrapper") == "OptimWrapper":
        wrapper |= {"type": "AmpOptimWrapper", "dtype": "bfloat16" if engine.passes == "bf16" else "float16"}
    if engine.batches > 1:
        wrapper["accumulative_counts"] = engine.batches
    return cfg


def _optimise_(cfg: Config, config: Finetune, given: set[str]) -> None:
    kind = {"sgd": "SGD", "adamw": "AdamW"}[config.optimizer]
    if "optimizer" in given and kind != cfg.optim_wrapper.optimizer.type:
        cfg.optim_wrapper.optimizer = {"type": kind}
        given |= {"lr", "weight_decay", "momentum"}
    optimizer = cfg.optim_wrapper.optimizer
    for name in {"lr", "weight_decay"} & given:
        optimizer[name] = getattr(config, name)
    if "momentum" in given and optimizer.type in ("Adam", "AdamW"):
        optimizer.betas = (config.momentum, 0.999)
    elif "momentum" in given:
        optimizer.momentum = config.momentum
    if config.clip is not None:
        cfg.optim_wrapper.clip_grad = {"max_norm": config.clip}


def _schedule(config: Finetune, total: int) -> list[dict[str, Any]]:
    """The recipe's own schedule, in iterations."""
    warm = round(config.warmup * total)
    found: list[dict[str, Any]] = []
    if warm:
        found.append({"type": "LinearLR", "start_factor": 1 / (warm + 1), "by_epoch": False, "begin": 0, "end": warm})
    if config.schedule == "cosine":
        span = {"T_max": max(1, total - warm), "begin": warm, "end": total}
        found.append({"type": "CosineAnnealingLR", "by_epoch": False, **span})
    elif config.schedule == "step":
        marks = [round(share * total) for share in config.milestones]
        found.append({"type": "MultiStepLR", "by_epoch": False, "milestones": marks, "gamma": 0.1})
    return found


def _stretched(schedulers: Any, factor: float, per_epoch: int, whole: bool) -> list[dict[str, Any]]:
    """The config's schedulers for a training so many times as long; in iterations if in no whole epochs."""
    made = []
    for old in [schedulers] if isinstance(schedulers, dict) else schedulers or []:
        new, by_epoch = dict(old), old.get("by_epoch", True)
        new["by_epoch"] = by_epoch and whole
        if not new["by_epoch"]:
            new.pop("convert_to_iter_based", None)
        unit = factor * (per_epoch if by_epoch and not whole else 1)
        for mark in [m for m in MARKS if m in old]:
            value = old[mark]
            new[mark] = [round(v * unit) for v in value] if mark == "milestones" else round(value * unit)
        if "end" in new:
            new["end"] = max(new["end"], new.get("begin", 0) + 1)
        if "T_max" in new:
            new["T_max"] = max(new["T_max"], 1)
        made.append(new)
    return made
