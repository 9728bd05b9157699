"""Set and restore the training flags of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from .traversal import modules_of, scripted_modules


@contextlib.contextmanager
def module_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Run in eval mode, or in training mode with leaf modules (norms, dropout) in eval mode; restore all flags.

    Flags are set directly, because the `train()` of some libraries does more than set them.
    """
    modules = [*modules_of(model).values(), *(m for s in scripted_modules(model).values() for m in s.modules())]
    before = [(module, module.training) for module in modules]
    try:
        for module, flag in before:
            new_flag = training and any(child is not None for child in module._modules.values())
            if flag != new_flag:
                module.training = new_flag
        yield
    finally:
        for module, flag in before:
            if module.training != flag:
                module.training = flag
