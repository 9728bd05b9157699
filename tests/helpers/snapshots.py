"""Record everything that can be seen of a model, and compare two records."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def snapshot(model: nn.Module) -> list[Any]:
    """All that can be seen of a model without running it."""
    seen: list[Any] = [
        (name, id(t), t.clone(), t.requires_grad) for name, t in model.state_dict(keep_vars=True).items()
    ]
    seen += [(name, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()]
    for name, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        hooks = [len(getattr(module, key)) for key in vars(module) if key.endswith("_hooks")]
        seen.append((name, type(module), module.training, plain, hooks))
    return seen


def same_snapshot(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_snapshot, a, b))
    return bool(a == b)
