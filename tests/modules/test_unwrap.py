"""Wrappers of torch around a model are removed."""

from __future__ import annotations

import torch
from torch import nn

import compress
from helpers.digits import dense


def test_wrappers_of_torch_are_removed() -> None:
    recipe = {"budget": {"macs": 0.5}, "timing": {"repeats": 3}}
    x = torch.randn(1, 1, 8, 8)
    plain = compress.prune(dense(), recipe, example_inputs=x, quiet=True)
    for wrapped in (nn.DataParallel(dense()), torch.compile(dense())):
        pruned = compress.prune(wrapped, recipe, example_inputs=x, quiet=True)
        assert pruned.plan.keep == plain.plan.keep
        assert type(pruned.model) is type(plain.model)
