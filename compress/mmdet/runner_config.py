"""The mmengine config of a fine-tuning: the detector's config, changed by the recipe's `finetune`.

The number of steps always comes from the recipe; the config's schedule is stretched to it. Optimizer, lr, momentum,
weight_decay, clip, schedule, warmup and milestones come from the recipe if it sets them, else from the config.
"""

from __future__ import annotations

import copy
from typing import Any

from mmengine.config import Config

from compress.recipe import EngineConfig, Finetune

SCHEDULER_TIMES = ("begin", "end", "T_max", "milestones")  # keys of a scheduler, in epochs or iterations


def finetune_config(
    cfg: Config, finetune: Finetune, total: int, per_epoch: int, engine: EngineConfig | None = None
) -> Config:
    """Return the config of a fine-tuning for `total` steps.

    It counts epochs if the recipe gives a whole number of epochs and the config counts epochs, else iterations.

    Args:
        cfg: the detector's config; it is not changed.
        per_epoch: steps of an epoch.
    """
    engine = engine or EngineConfig()
    cfg, fields_set = copy.deepcopy(cfg), finetune.model_fields_set
    train_cfg = cfg.get("train_cfg") or {}
    config_total = train_cfg.get("max_iters") or train_cfg.get("max_epochs", 0) * per_epoch or total
    val_interval = train_cfg.get("val_interval", 1)
    whole_epochs = finetune.epochs.unit == "epochs" and finetune.epochs.count == int(finetune.epochs.count)
    by_epoch = whole_epochs and "max_iters" not in train_cfg
    hooks = cfg.get("default_hooks") or {}
    checkpoint = None  # of the config, for other tools: a run is resumed from checkpoints of its own
    if hooks.get("checkpoint") is not None:
        checkpoint = {"type": "CheckpointHook", "interval": 1, "max_keep_ckpts": 1, **hooks["checkpoint"]}
    if by_epoch:
        epochs = int(finetune.epochs.count)
        cfg.train_cfg = {"type": "ResumableEpochLoop", "max_epochs": epochs, "val_interval": val_interval}
    else:
        val_interval = min(total, val_interval * (1 if "max_iters" in train_cfg else per_epoch))
        cfg.train_cfg = {"type": "ResumableIterLoop", "max_iters": total, "val_interval": val_interval}
        if checkpoint is not None:
            checkpoint |= {"by_epoch": False, "interval": min(total, per_epoch)}
        cfg.log_processor = {**cfg.get("log_processor", {}), "by_epoch": False}
    cfg.default_hooks = {**hooks, "checkpoint": checkpoint}
    if fields_set & {"schedule", "warmup", "milestones"}:
        cfg.param_scheduler = _recipe_schedule(finetune, total)
    else:
        cfg.param_scheduler = _stretch_schedulers(cfg.get("param_scheduler"), total / config_total, per_epoch, by_epoch)
    _set_optimizer_(cfg, finetune, set(fields_set))
    wrapper = cfg.get("optim_wrapper") or {}
    precision = engine.effective_precision
    if precision != "float32" and wrapper.get("type", "OptimWrapper") == "OptimWrapper":
        wrapper |= {"type": "AmpOptimWrapper", "dtype": "bfloat16" if precision == "bf16" else "float16"}
    if engine.batches_per_step > 1:
        wrapper["accumulative_counts"] = engine.batches_per_step
    return cfg


def _set_optimizer_(cfg: Config, finetune: Finetune, fields_set: set[str]) -> None:
    """Change the config's optimizer by the fields that the recipe sets; another type takes all of them."""
    optimizer_type = {"sgd": "SGD", "adamw": "AdamW"}[finetune.optimizer]
    if "optimizer" in fields_set and optimizer_type != cfg.optim_wrapper.optimizer.type:
        cfg.optim_wrapper.optimizer = {"type": optimizer_type}
        fields_set |= {"lr", "weight_decay", "momentum"}
    optimizer = cfg.optim_wrapper.optimizer
    for name in {"lr", "weight_decay"} & fields_set:
        optimizer[name] = getattr(finetune, name)
    if "momentum" in fields_set and optimizer.type in ("Adam", "AdamW"):
        optimizer.betas = (finetune.momentum, 0.999)
    elif "momentum" in fields_set:
        optimizer.momentum = finetune.momentum
    if finetune.clip is not None:
        cfg.optim_wrapper.clip_grad = {"max_norm": finetune.clip}


def _recipe_schedule(finetune: Finetune, total: int) -> list[dict[str, Any]]:
    """Return the recipe's own schedule as mmengine schedulers, in iterations."""
    warmup = round(finetune.warmup * total)
    schedulers: list[dict[str, Any]] = []
    if warmup:
        ramp = {"start_factor": 1 / (warmup + 1), "by_epoch": False, "begin": 0, "end": warmup}
        schedulers.append({"type": "LinearLR", **ramp})
    if finetune.schedule == "cosine":
        span = {"T_max": max(1, total - warmup), "begin": warmup, "end": total}
        schedulers.append({"type": "CosineAnnealingLR", "by_epoch": False, **span})
    elif finetune.schedule == "step":
        milestones = [round(fraction * total) for fraction in finetune.milestones]
        schedulers.append({"type": "MultiStepLR", "by_epoch": False, "milestones": milestones, "gamma": 0.1})
    return schedulers


def _stretch_schedulers(schedulers: Any, factor: float, per_epoch: int, by_epoch: bool) -> list[dict[str, Any]]:
    """Return the config's schedulers for a training that is `factor` times as long.

    Args:
        by_epoch: whether the new training counts epochs; else schedulers that do are converted to iterations.
    """
    stretched = []
    for old in [schedulers] if isinstance(schedulers, dict) else schedulers or []:
        new, counts_epochs = dict(old), old.get("by_epoch", True)
        new["by_epoch"] = counts_epochs and by_epoch
        if not new["by_epoch"]:
            new.pop("convert_to_iter_based", None)
        scale = factor * (per_epoch if counts_epochs and not by_epoch else 1)
        for key in [key for key in SCHEDULER_TIMES if key in old]:
            value = old[key]
            new[key] = [round(v * scale) for v in value] if key == "milestones" else round(value * scale)
        if "end" in new:
            new["end"] = max(new["end"], new.get("begin", 0) + 1)
        if "T_max" in new:
            new["T_max"] = max(new["T_max"], 1)
        stretched.append(new)
    return stretched
