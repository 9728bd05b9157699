"""Warnings about the result of a search, e.g. groups whose scores are all zero."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sized

from torch import Tensor, nn

from compress.formatting import printable
from compress.recipe import Recipe


def warn_about_zero_scores(recipe: Recipe, importance: Mapping[str, Tensor], keep: Mapping[str, Sized]) -> list[str]:
    """Warn about groups whose scores are all zero, or a learned budget with no zero score; return the warnings."""
    empty_groups = [n for n, value in importance.items() if len(keep[n]) and not bool((value != 0).any())]
    no_zeros = all(bool((value != 0).all()) for value in importance.values())
    if recipe.budget.auto and no_zeros and not recipe.search.removes_structures:  # kernels may still be cropped
        note = "no score reached zero, so nothing is pruned: raise search.gamma, its learning rate or its length"
    elif empty_groups:
        note = _empty_groups_note(recipe, {name: len(keep[name]) for name in empty_groups})
    else:
        return []
    warnings.warn(printable(note), stacklevel=2)
    return [note]


def _empty_groups_note(recipe: Recipe, widths: Mapping[str, int]) -> str:
    reason = "target.min_keep"
    if any(width > recipe.target.min_keep for width in widths.values()):
        reason = "target.min_keep and round_to" if recipe.budget.auto else "the budget has room for them"
    several = len(widths) > 1
    plural = "s" * (several or next(iter(widths.values())) > 1)
    return (
        f"every score of {', '.join(widths)} reached zero: {'they keep' if several else 'it keeps'} "
        f"{', '.join(map(str, widths.values()))} dimension{plural} "
        f"({reason}). Lower gamma or the learning rate if that is not what you want"
    )


def describe_zero_weights(model: nn.Module) -> str:
    """Return a note on how many weights of the sliced network are zero."""
    weights = [p.detach() for p in model.parameters() if p.ndim > 1]
    num_zeros, total = sum(int((w == 0).sum()) for w in weights), sum(w.numel() for w in weights)
    return (
        f"{num_zeros} of {total} weights of the sliced network are zero: they save no time in dense layers, and "
        "fine-tuning changes them"
    )
