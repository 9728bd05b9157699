"""Tensors are found in everything that a model takes or returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from compress.modules.nested_tensors import tensors_in


def test_tensors_are_found_in_order_in_lists_dicts_and_objects() -> None:
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    tree = {"first": [a, (b, None, "text")], "second": SimpleNamespace(logits=c, layer=nn.Linear(1, 1)), "third": d}
    assert [float(t) for t in tensors_in(tree)] == [0, 1, 2, 3]


def test_an_object_that_holds_itself_is_visited_once() -> None:
    tree: list[Any] = [torch.zeros(1)]
    tree += [tree, {"again": tree}]
    assert len(tensors_in(tree)) == 1
