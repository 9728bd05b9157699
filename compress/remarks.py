"""What is to be said about what a search has left."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from .recipe import Recipe


def gone_to_zero(recipe: Recipe, importance: dict[str, Tensor], keep: dict[str, Any]) -> list[str]:
    """Groups in which the search left nothing, or a learned budget that leaves all; said at once, and noted."""
    dead = [n for n, value in importance.items() if len(keep[n]) and not bool((value != 0).any())]
    whole = all(bool((value != 0).all()) for value in importance.values())
    if recipe.budget.auto and whole and not hasattr(recipe.search, "structure"):  # kernels may be cut
        note = "no score came to zero, so nothing is cut: raise search.gamma, its learning rate or its length"
        warnings.warn(note, stacklevel=2)
        return [note]
    if not dead:
        return []
    several = len(dead) > 1
    why = "target.min_keep"
    if any(len(keep[name]) > recipe.target.min_keep for name in dead):
        why = "target.min_keep and round_to" if recipe.budget.auto else "there is room for that in the budget"
    note = (
        f"every score of {', '.join(dead)} came to zero: {'they keep' if several else 'it keeps'} "
        f"{', '.join(str(len(keep[name])) for name in dead)} dimension{'s' * (several or len(keep[dead[0]]) > 1)} "
        f"({why}). Lower gamma or the learning rate if that is not what you want"
    )
    warnings.warn(note, stacklevel=2)
    return [note]


def zeros(model: nn.Module) -> str:
    weights = [p.detach() for p in model.parameters() if p.ndim > 1]
    zeros, total = sum(int((w == 0).sum()) for w in weights), sum(w.numel() for w in weights)
    return (
        f"{zeros} of {total} weights of the sliced network are zero: they save no time in dense layers, and "
        "fine-tuning moves them"
    )
