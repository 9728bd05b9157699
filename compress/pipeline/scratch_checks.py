"""Checks of a training from scratch, before a run."""

from __future__ import annotations

from torch import nn

from compress.modules import Choice, SearchSpace, modules_of
from compress.recipe import Finetune, Recipe


def scratch_problems(model: nn.Module, recipe: Recipe, config: Finetune) -> list[str]:
    """Return the settings of a training from scratch, and of a network of cells, that the model does not support."""
    problems, kind = [], type(model).__name__
    is_space = isinstance(model, SearchSpace) and recipe.target.operations
    for name in ("drop_path", "auxiliary", "cells", "channels"):
        if getattr(config, name) and not is_space:
            problems.append(
                f"finetune.{name}: needs a network of cells, such as compress.cells.darts_network, and "
                f"target.operations; the model is a {kind}"
            )
    if config.auxiliary and isinstance(model, SearchSpace) and not model.can_have_auxiliary_head:
        problems.append(f"finetune.auxiliary: a {kind} has no place for an auxiliary head; leave auxiliary out")
    if config.from_ == "scratch" and not is_rebuilt(model, recipe):
        fixed = [
            path or kind
            for path, module in modules_of(model).items()
            if any(p is not None for p in module._parameters.values())
            and not can_reset(module)
            and not isinstance(module, Choice)
        ]
        if fixed:
            problems.append(
                f"finetune.from: scratch needs a method reset_parameters to draw new weights with; these have none: "
                f"{', '.join(fixed[:4])}"
            )
    return problems


def is_rebuilt(model: nn.Module, recipe: Recipe) -> bool:
    """Return whether the network is built anew from its genotype: not if widths were cut as well."""
    return isinstance(model, SearchSpace) and recipe.target.operations and not recipe.target.widths


def can_reset(module: nn.Module) -> bool:
    """Return whether a module can draw new weights by itself."""
    return callable(getattr(module, "reset_parameters", None))
