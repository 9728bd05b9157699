"""Optimisers and rates, as a recipe's training section describes them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn, optim

from .fields import Training


def optimiser(
    config: Training, weights: Iterable[nn.Parameter], scores: Iterable[nn.Parameter] = ()
) -> optim.Optimizer:
    """Weights with decay, biases and norms without, scores with what the config says. What is frozen stays out.

    Raises:
        ValueError: nothing in the model can be trained.
    """
    scores = list(scores)
    known = {id(s) for s in scores}
    weights = [p for p in weights if p.requires_grad and id(p) not in known]
    groups = [
        {"params": [p for p in weights if p.ndim > 1], "rate": config.lr, "weight_decay": config.weight_decay},
        {"params": [p for p in weights if p.ndim <= 1], "rate": config.lr, "weight_decay": 0.0},
        {"params": scores, "rate": config.lr, "weight_decay": config.weight_decay},
    ]
    groups = [g for g in groups if g["params"]]
    if not groups:
        raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
    if config.optimizer == "adamw":
        return optim.AdamW(groups, lr=config.lr, betas=(config.momentum, 0.999))
    return optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0)


def rate(config: Training, done: int, total: int) -> float:
    """The factor on the learning rate at step `done` of `total`.

    >>> from compress.fields import Length
    >>> flat = Training(epochs=Length.model_validate(1), schedule="cosine", warmup=0.2)
    >>> [round(rate(flat, step, 10), 2) for step in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.04]
    """
    warm = math.ceil(config.warmup * total)
    if done < warm:
        return (done + 1) / warm
    past = (done - warm) / max(1, total - warm)
    if config.schedule == "cosine":
        return (1 + math.cos(math.pi * past)) / 2
    if config.schedule == "step":
        return float(0.1 ** sum(done / total >= m for m in config.milestones))
    return 1.0


def set_rate(optimizer: optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["rate"] * factor


def clip(config: Training, model: nn.Module) -> None:
    if config.clip is not None:
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], config.clip)
