"""Learning rate schedule: warmup, then cosine, steps or a constant."""

from __future__ import annotations

import math

from torch import optim

from compress.recipe import TrainingConfig


def lr_factor(config: TrainingConfig, done: int, total: int) -> float:
    """Return the factor on the learning rate after `done` of `total` steps.

    >>> from compress.recipe import Length
    >>> config = TrainingConfig(epochs=Length.model_validate(1), schedule="cosine", warmup=0.2)
    >>> [round(lr_factor(config, step, 10), 2) for step in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.04]
    """
    warmup = math.ceil(config.warmup * total)
    if done < warmup:
        return (done + 1) / warmup
    progress = (done - warmup) / max(1, total - warmup)
    if config.schedule == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    if config.schedule == "step":
        return float(0.1 ** sum(done / total >= m for m in config.milestones))
    return 1.0


def set_lr_(optimizer: optim.Optimizer, factor: float) -> None:
    """Set each group's learning rate to `factor` times its `base_lr`."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
