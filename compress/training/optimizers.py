"""Optimizers and gradient clipping as a training section of a recipe describes them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn, optim

from compress.recipe import TrainingConfig


def make_optimizer(
    config: TrainingConfig, weights: Iterable[nn.Parameter], scores: Iterable[nn.Parameter] = ()
) -> optim.Optimizer:
    """Return the optimizer of a config: weight decay on weights and scores; on biases and norms with `decay_norms`.

    Frozen parameters are left out. Each parameter group has its `base_lr`, which `set_lr_` multiplies.

    Raises:
        ValueError: no parameter requires a gradient.
    """
    scores = list(scores)
    score_ids = {id(s) for s in scores}
    weights = [p for p in weights if p.requires_grad and id(p) not in score_ids]
    decay = config.weight_decay
    groups = [
        {"params": [p for p in weights if p.ndim > 1], "base_lr": config.lr, "weight_decay": decay},
        {
            "params": [p for p in weights if p.ndim <= 1],
            "base_lr": config.lr,
            "weight_decay": decay if config.decay_norms else 0.0,
        },
        {"params": scores, "base_lr": config.lr, "weight_decay": decay},
    ]
    groups = [g for g in groups if g["params"]]
    if not groups:
        raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
    if config.optimizer != "sgd":
        adam = optim.AdamW if config.optimizer == "adamw" else optim.Adam  # adam: weight decay in the gradient
        return adam(groups, lr=config.lr, betas=(config.momentum, 0.999))
    return optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0)
