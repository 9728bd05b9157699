"""Find the tensors in the nested inputs or outputs of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested lists, dicts and objects with attributes, in order; visit each container once."""
    tensors: list[Tensor] = []
    seen: set[int] = set()

    def visit(item: Any) -> None:
        if isinstance(item, Tensor):
            tensors.append(item)
            return
        if isinstance(item, (str, bytes, int, float, complex, bool, type(None), nn.Module, type)) or id(item) in seen:
            return
        seen.add(id(item))
        if isinstance(item, Mapping):
            for value in item.values():
                visit(value)
        elif isinstance(item, (list, tuple, set, frozenset)):
            for value in item:
                visit(value)
        elif hasattr(item, "__dict__"):
            for value in vars(item).values():
                visit(value)

    visit(tree)
    return tensors
